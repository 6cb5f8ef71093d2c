"""The pointwise, page and embedding kernels on a GPU, at the sizes of real models, against their torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels.activation
import kernels.linear
import kernels.norm
import kernels.pages
import kernels.rope_store
from kernels.rotary import NEOX, RotaryStyle

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

EPS = 1e-5
TOKENS = (1, 2, 16, 257, 8192)
BF16 = torch.bfloat16


def randn(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).mul_(scale).to(BF16)


def assert_near(got: Tensor, expected: Tensor, bound: float = 1e-3) -> None:
    """By the relative norm; a NaN is in no bound."""
    assert got.dtype == expected.dtype and got.shape == expected.shape
    wide, expected_wide = got.float(), expected.float()
    error = float((wide - expected_wide).norm() / expected_wide.norm().clamp(min=1e-12))
    assert error < bound, error


@pytest.mark.parametrize("dim", [1024, 4096, 5120, 8192])
@pytest.mark.parametrize("num_tokens", TOKENS)
def test_norms(num_tokens: int, dim: int) -> None:
    from kernels.cuda import norm

    x, residual, weight = randn(num_tokens, dim), randn(num_tokens, dim, scale=8), randn(dim)
    assert_near(norm.rms_norm(x, weight, EPS), kernels.norm.rms_norm(x, weight, EPS))
    expected, expected_total = kernels.norm.add_rms_norm(x, residual, weight, EPS)
    got, total = norm.add_rms_norm(x, residual.clone(), weight, EPS)
    assert_near(got, expected)
    assert torch.equal(total, expected_total)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize(("num_tokens", "dim"), [(2, 1024), (257, 4096), (8192, 4096), (3, 16384), (3, 20480)])
def test_quantised_norms(num_tokens: int, dim: int, dtype: torch.dtype) -> None:
    from kernels.cuda import norm

    x, residual, weight = randn(num_tokens, dim), randn(num_tokens, dim), randn(dim)
    x[-1], residual[-1] = 0, 0
    normed, expected_total = norm.add_rms_norm(x, residual.clone(), weight, EPS)
    *got, total = norm.add_rms_norm_quantised(x, residual.clone(), weight, EPS, dtype)
    assert torch.equal(total, expected_total)
    assert_quantised(*got, normed)
    codes, scales = norm.rms_norm_quantised(x, weight, EPS, dtype)
    assert_quantised(codes, scales, norm.rms_norm(x, weight, EPS))
    assert scales[-1] == 1


def assert_quantised(codes: Tensor, scales: Tensor, normed: Tensor) -> None:
    """To the bit what a CPU makes of the norm: on a device, torch divides by a number in another way."""
    expected_codes, expected_scales = kernels.norm.quantised(normed.cpu(), codes.dtype)
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.cpu().float(), expected_codes.float())


def test_a_row_does_not_depend_on_the_others() -> None:
    from kernels.cuda import norm

    x, weight = randn(4096, 4096), randn(4096)
    assert torch.equal(norm.rms_norm(x, weight, EPS)[7:8], norm.rms_norm(x[7:8], weight, EPS))


def test_norm_of_heads() -> None:
    from kernels.cuda import norm

    fused, weight = randn(1000, 48 * 128), randn(128)
    q = fused[:, : 32 * 128].view(1000, 32, 128)
    assert_near(norm.rms_norm(q, weight, EPS), kernels.norm.rms_norm(q, weight, EPS))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
@pytest.mark.parametrize("num_tokens", TOKENS)
@pytest.mark.parametrize("inner", [3072, 14336])
def test_gates(name: str, num_tokens: int, inner: int) -> None:
    from kernels.cuda import activation

    gate_up = randn(num_tokens, 2 * inner, scale=3)
    assert_near(getattr(activation, name)(gate_up), getattr(kernels.activation, name)(gate_up))


@pytest.mark.parametrize("num_tokens", TOKENS)
def test_embed(num_tokens: int) -> None:
    from kernels.cuda.embedding import embed

    table, ids = randn(150_000, 4096), torch.randint(150_000, (num_tokens,), device="cuda")
    assert torch.equal(embed(table, ids), kernels.linear.embed(table, ids))


def assert_rope_store(
    heads: tuple[int, int, int],
    num_tokens: int,
    *,
    style: RotaryStyle = NEOX,
    rotary_dim: int = 0,
    norms: bool = False,
    page_size: int = 16,
    kv_dtype: torch.dtype = BF16,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    from kernels.cuda.rope_store import rope_store

    num_heads, num_kv_heads, head_dim = heads
    fused = randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    expected_fused = fused.clone()
    num_pages = num_tokens // page_size + 7
    kv = torch.zeros(num_pages, 2, page_size, num_kv_heads, head_dim, device="cuda").to(kv_dtype)
    expected_kv = kv.clone()
    angles = torch.rand(5000, (rotary_dim or head_dim) // 2, device="cuda") * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    shape = (num_tokens,) if style.axes is None else (3, num_tokens)
    positions = torch.randint(5000, shape, device="cuda")
    locations = torch.randperm(num_pages * page_size, device="cuda")[:num_tokens]
    weights = (randn(head_dim), randn(head_dim)) if norms else (None, None)
    split = [num_heads, num_kv_heads, num_kv_heads]
    rest = (*weights, EPS, style, *scales)
    rope_store(*fused.split(split, 1), positions, cos_sin, kv, locations, *rest)
    kernels.rope_store.rope_store(*expected_fused.split(split, 1), positions, cos_sin, expected_kv, locations, *rest)
    assert_near(fused[:, :num_heads], expected_fused[:, :num_heads])
    assert_near(kv, expected_kv, 1e-3 if kv_dtype == BF16 else 1e-2)


@pytest.mark.parametrize("heads", [(9, 3, 64), (32, 8, 128), (16, 2, 256), (4, 4, 80), (8, 1, 128)])
@pytest.mark.parametrize("num_tokens", [1, 257, 8192])
@pytest.mark.parametrize("norms", [False, True])
def test_rope_store(heads: tuple[int, int, int], num_tokens: int, norms: bool) -> None:
    assert_rope_store(heads, num_tokens, norms=norms)


@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 32, 64, 128])
def test_rope_store_of_parts(num_tokens: int, interleaved: bool, rotary_dim: int) -> None:
    style = RotaryStyle(interleaved)
    assert_rope_store((32, 8, 128), num_tokens, style=style, rotary_dim=rotary_dim, norms=True)
    assert_rope_store((3, 1, 128), num_tokens, style=style, rotary_dim=rotary_dim)


@pytest.mark.parametrize("num_tokens", [1, 1000])
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rope_store_in_8_bits(num_tokens: int, page_size: int, kv_dtype: torch.dtype) -> None:
    assert_rope_store((32, 8, 128), num_tokens, page_size=page_size, kv_dtype=kv_dtype, scales=(0.03, 0.02))


@pytest.mark.parametrize("num_tokens", [1, 1000])
def test_rope_store_by_axes(num_tokens: int) -> None:
    axes = torch.tensor([0] * 16 + [1] * 24 + [2] * 24, device="cuda")
    assert_rope_store((32, 8, 128), num_tokens, style=RotaryStyle(axes=axes))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_tables(page_size: int) -> None:
    from kernels.cuda.pages import gather_pages, page_lists

    width = 8192 // page_size
    table = torch.randint(1 << 20, (300, width), dtype=torch.int32, device="cuda")
    kv_lens = torch.randint(8193, (256,), device="cuda")
    kv_lens[3] = 0
    rows = torch.randperm(300, device="cuda")[:256]
    gathered = gather_pages(table, rows, kv_lens, page_size, width)
    assert torch.equal(gathered, kernels.pages.gather_pages(table, rows, kv_lens, page_size, width))
    got = page_lists(gathered, kv_lens, page_size, 256 * width)
    expected = kernels.pages.page_lists(gathered, kv_lens, page_size, 256 * width)
    assert all(torch.equal(part, expected_part) for part, expected_part in zip(got, expected, strict=True))


@pytest.mark.parametrize("heads", [(8, 128), (2, 256), (3, 80), (1, 16)])
@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn])
def test_compact_kv(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Each row's places move by one, so that every source but the first is a later target; many times, for races."""
    from kernels.cuda.pages import compact_kv
    from kernels.pages import KVLayers

    num_rows, width = 64, 11
    before = torch.randn(8, 64, 2, 16, *heads, device="cuda").to(dtype)
    counts = torch.randint(width + 1, (num_rows,), device="cuda")
    targets = torch.arange(num_rows, device="cuda").unsqueeze(1) * 16 + torch.arange(width, device="cuda")
    expected = before.view(torch.uint8).clone()
    for row, count in enumerate(counts.tolist()):
        moved = expected[:, row, :, 1 : count + 1].clone()
        expected[:, row, :, :count] = moved
    for _ in range(20):
        kv = before.clone()
        compact_kv(KVLayers.of(kv.unbind()), targets + 1, targets, counts)
        assert torch.equal(kv.view(torch.uint8), expected)


def test_all_in_a_graph() -> None:
    """What is launched within a graph is all on the device."""
    from kernels.cuda import activation, embedding, norm, pages

    table, ids, weight = randn(1000, 1024), torch.randint(1000, (4,), device="cuda"), randn(1024)
    page_table, kv_lens = torch.ones(4, 8, dtype=torch.int32, device="cuda"), torch.tensor([3, 0, 16, 99]).cuda()

    def step() -> tuple[Tensor, ...]:
        x = embedding.embed(table, ids)
        normed, total = norm.add_rms_norm(x, x.clone(), weight, EPS)
        codes, scales, _ = norm.add_rms_norm_quantised(normed, total.clone(), weight, EPS, torch.float8_e4m3fn)
        lists = pages.page_lists(pages.gather_pages(page_table, ids % 4, kv_lens, 16, 8), kv_lens, 16, 32)
        return activation.silu_and_mul(total), codes.view(torch.uint8), scales, *lists

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert all(torch.equal(part, expected_part) for part, expected_part in zip(got, expected, strict=True))
