"""Norms, activation, rotary, KV writes: against formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from kernels.kv_write import write_kv
from kernels.linear import embed
from kernels.norm import add_rms_norm, add_rms_norm_quantised, rms_norm, rms_norm_quantised
from kernels.rope_store import rope_store
from kernels.rotary import RotaryStyle, rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, 48).to(dtype), torch.rand(48).add(0.5).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    got = rms_norm(x[:, 1:], weight, 1e-5)
    assert got.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), expected[:, 1:], atol=tolerance, rtol=tolerance)


def test_add_rms_norm() -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    total = x + residual
    normed, new_residual = add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", CODES)
def test_rms_norm_quantised(dtype: torch.dtype) -> None:
    x, weight = torch.randn(6, 40).bfloat16(), torch.rand(40).add(0.5).bfloat16()
    x[2] = 0
    codes, scales = rms_norm_quantised(x, weight, 1e-5, dtype)
    normed = rms_norm(x, weight, 1e-5).float()
    assert codes.dtype == dtype and scales.dtype == torch.float32 and scales.shape == (6, 1)
    expected = normed.abs().amax(1, keepdim=True) / largest(dtype)
    expected[2] = 1
    torch.testing.assert_close(scales, expected, atol=0, rtol=2e-7)
    assert not codes[2].float().any()
    # Half a step: of the row for int8; of the number, or of the smallest there are, for floats.
    steps = {torch.int8: 0.0, torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[dtype] * normed.abs()
    smallest = {torch.int8: 0.5, torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17}[dtype] * scales
    error = (codes.float() * scales - normed).abs()
    assert (error <= torch.maximum(steps, smallest) * 1.0001).all()
    # The largest of a row is exact, being the type's largest.
    rows = [0, 1, 3, 4, 5]
    assert (codes.float().abs().amax(1)[rows] == largest(dtype)).all()


@pytest.mark.parametrize("dtype", CODES)
def test_add_rms_norm_quantised(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(4, 32), torch.randn(4, 32), torch.rand(32)
    codes, scales, total = add_rms_norm_quantised(x.clone(), residual.clone(), weight, 1e-6, dtype)
    assert torch.equal(total, x + residual)
    expected_codes, expected_scales = rms_norm_quantised(total, weight, 1e-6, dtype)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


def test_codes_of_a_row() -> None:
    x = torch.tensor([[7.0, 3.0, 1.0, -5.0] * 4])
    codes, scales = rms_norm_quantised(x, torch.ones(16), 0.0, torch.int8)
    torch.testing.assert_close(scales, torch.full((1, 1), 7 / 127 / math.sqrt(21)))
    # 54.4, 18.1 and -90.7.
    assert codes.tolist() == [[127, 54, 18, -91] * 4]


def test_gelu_and_mul() -> None:
    x = torch.randn(3, 20, dtype=torch.float64)
    gate, up = x[:, :10], x[:, 10:]
    exact = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
    tanh = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    torch.testing.assert_close(gelu_and_mul(x.float()).double(), exact * up, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gelu_tanh_and_mul(x.float()).double(), tanh * up, atol=1e-6, rtol=1e-5)


def test_the_activation_is_rounded_before_the_product() -> None:
    # Of other values one in thousands lies so near the middle of two roundings that the two ways differ.
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = (F.gelu(x[:, :32].float()).bfloat16().float() * x[:, 32:].float()).bfloat16()
    assert torch.equal(gelu_and_mul(x), expected)


def test_embed() -> None:
    table, ids = torch.randn(9, 4), torch.tensor([8, 0, 0])
    assert torch.equal(embed(table, ids), table[ids])


def test_silu_and_mul() -> None:
    x = torch.randn(3, 20)
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :10]) * x[:, 10:])


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_rope(rotary_dim: int) -> None:
    qkv = torch.randn(6, 5, 16)
    q, k, v = qkv.split([3, 1, 1], dim=1)
    before, positions = qkv.clone(), torch.tensor([3, 0, 9, 1, 9, 2])
    angles = torch.rand(10, rotary_dim // 2) * 6
    rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), -1))
    half = rotary_dim // 2
    turn = torch.polar(torch.ones(6, 1, half), angles[positions].unsqueeze(1))
    rotated = torch.complex(before[:, :4, :half], before[:, :4, half:rotary_dim]) * turn
    expected = torch.cat((rotated.real, rotated.imag, before[:, :4, rotary_dim:]), -1)
    torch.testing.assert_close(torch.cat((q, k), 1), expected)
    assert torch.equal(v, before[:, 4:])


def turned(heads: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotated heads by complex products in float64. angles: `[num_tokens, pairs]`."""
    pairs = angles.shape[1]
    wide = heads.double()
    turning = wide[..., : 2 * pairs]
    if interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., :pairs], turning[..., pairs:]
    product = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    if interleaved:
        rotated = torch.view_as_real(product).flatten(-2)
    else:
        rotated = torch.cat((product.real, product.imag), -1)
    return torch.cat((rotated, wide[..., 2 * pairs :]), -1)


@pytest.mark.parametrize("rotary_dim", [8, 16])
def test_interleaved_rope(rotary_dim: int) -> None:
    q, k = torch.randn(6, 3, 16), torch.randn(6, 2, 16)
    angles = torch.rand(10, rotary_dim // 2, dtype=torch.float64) * 6
    positions = torch.tensor([3, 0, 9, 1, 9, 2])
    expected = [turned(heads, angles[positions], True) for heads in (q, k)]
    rope(q, k, positions, torch.cat((angles.cos(), angles.sin()), -1).float(), RotaryStyle(interleaved=True))
    for got, of_heads in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got.double(), of_heads, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("axes", [[0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1]])
def test_rope_by_axes(axes: list[int], interleaved: bool) -> None:
    """Sections of time, height and width, as blocks (Qwen2-VL) or interleaved (Qwen3-VL): pair by pair."""
    q, k = torch.randn(4, 3, 16), torch.randn(4, 1, 16)
    angles = torch.rand(10, 8, dtype=torch.float64) * 6
    positions = torch.tensor([[0, 1, 2, 9], [0, 5, 2, 8], [0, 7, 2, 3]])
    picked = torch.empty(4, 8, dtype=torch.float64)
    for token in range(4):
        for pair, axis in enumerate(axes):
            picked[token, pair] = angles[positions[axis, token], pair]
    expected = [turned(heads, picked, interleaved) for heads in (q, k)]
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    rope(q, k, positions, cos_sin, RotaryStyle(interleaved, torch.tensor(axes)))
    for got, of_heads in zip((q, k), expected, strict=True):
        torch.testing.assert_close(got.double(), of_heads, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_write_kv_in_8_bits(dtype: torch.dtype) -> None:
    kv = torch.full((3, 2, 4, 2, 8), torch.nan).to(dtype)
    k, v = torch.randn(2, 2, 8).bfloat16(), torch.randn(2, 2, 8).bfloat16()
    k[0, 0, :2] = torch.tensor([1e9, -1e9])
    write_kv(kv, k, v, torch.tensor([9, 2]), 0.5, 0.3)
    for values, half, scale in ((k, 0, 0.5), (v, 1, 0.3)):
        expected = (values.float() / scale).clamp(-largest(dtype), largest(dtype)).to(dtype).float()
        assert torch.equal(kv[2, half, 1].float(), expected[0])
        assert torch.equal(kv[0, half, 2].float(), expected[1])
    assert kv[2, 0, 1, 0, :2].float().tolist() == [largest(dtype), -largest(dtype)]
    assert int((~kv.float().isnan()).sum()) == 2 * 2 * 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_write_kv_with_scales(dtype: torch.dtype) -> None:
    kv, k, v = torch.zeros(2, 2, 4, 1, 8, dtype=dtype), torch.randn(1, 1, 8), torch.randn(1, 1, 8)
    write_kv(kv, k, v, torch.tensor([5]), 2.0, 0.25)
    assert torch.equal(kv[1, 0, 1], (k[0] / 2).to(dtype))
    assert torch.equal(kv[1, 1, 1], (v[0] * 4).to(dtype))


def test_rope_store_is_its_parts() -> None:
    q, k, v = (torch.randn(3, heads, 16) for heads in (4, 2, 2))
    q_norm, k_norm, angles = torch.rand(16), torch.rand(16), torch.rand(10, 8, dtype=torch.float64)
    positions, kv = torch.tensor([7, 1, 4]), torch.zeros(2, 2, 4, 2, 16)
    expected_q = turned(rms_norm(q, q_norm, 1e-6), angles[positions], False)
    expected_k = turned(rms_norm(k, k_norm, 1e-6), angles[positions], False)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).float()
    rope_store(q, k, v, positions, cos_sin, kv, torch.tensor([0, 6, 3]), q_norm, k_norm, 1e-6)
    torch.testing.assert_close(q.double(), expected_q, atol=1e-6, rtol=1e-5)
    for i, (page, offset) in enumerate([(0, 0), (1, 2), (0, 3)]):
        torch.testing.assert_close(kv[page, 0, offset].double(), expected_k[i], atol=1e-6, rtol=1e-5)
        assert torch.equal(kv[page, 1, offset], v[i])


def test_write_kv_touches_its_places_only() -> None:
    kv = torch.zeros(5, 3, 2, 4, 2, 8)[:, 1]
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(kv, k, v, torch.tensor([19, 0, 6]))
    for i, (page, offset) in enumerate([(4, 3), (0, 0), (1, 2)]):
        assert torch.equal(kv[page, 0, offset], k[i])
        assert torch.equal(kv[page, 1, offset], v[i])
    assert int((kv != 0).sum()) == 3 * 2 * 16
