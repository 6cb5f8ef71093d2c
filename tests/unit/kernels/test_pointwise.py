"""Norms, activation, rotary, KV writes: against formulas in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.activation import silu_and_mul
from kernels.kv_write import write_kv
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import rope


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


def test_write_kv_touches_its_places_only() -> None:
    kv = torch.zeros(5, 3, 2, 4, 2, 8)[:, 1]
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    write_kv(kv, k, v, torch.tensor([19, 0, 6]))
    for i, (page, offset) in enumerate([(4, 3), (0, 0), (1, 2)]):
        assert torch.equal(kv[page, 0, offset], k[i])
        assert torch.equal(kv[page, 1, offset], v[i])
    assert int((kv != 0).sum()) == 3 * 2 * 16
