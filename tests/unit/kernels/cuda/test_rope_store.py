"""Norms of heads, rotary and the write into pages in Triton, against kernels.rope_store."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels import rope_store as reference
from kernels.cuda import rope_store
from kernels.rotary import NEOX, RotaryStyle

EPS = 1e-6
NUM_PAGES = 5
LAYOUTS = ((9, 3, 64), (32, 8, 128), (16, 2, 256), (4, 4, 80))


@dataclass(frozen=True, eq=False)
class Case:
    """Inputs of one call; q, k and v are views of one projection that has NaN behind them."""

    fused: Tensor
    heads: tuple[int, int, int]
    positions: Tensor
    cos_sin: Tensor
    kv: Tensor
    locations: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    def qkv(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_heads, num_kv_heads, head_dim = self.heads
        dense = fused[:, : (num_heads + 2 * num_kv_heads) * head_dim].unflatten(1, (-1, head_dim))
        q, k, v = dense.split([num_heads, num_kv_heads, num_kv_heads], 1)
        return q, k, v


def make_case(
    device: torch.device,
    heads: tuple[int, int, int] = (9, 3, 64),
    *,
    num_tokens: int = 3,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 16,
    rotary_dim: int = 0,
    norms: bool = False,
    axes: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(sum(heads) + page_size)
    num_heads, num_kv_heads, head_dim = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    fused = torch.full((num_tokens, width + 8), torch.nan)
    fused[:, :width] = torch.randn(num_tokens, width, generator=generator) * 2
    angles = torch.rand(40, (rotary_dim or head_dim) // 2, generator=generator) * 6
    shape = (axes, num_tokens) if axes else (num_tokens,)
    kv_dtype = kv_dtype or dtype
    kv = torch.full((NUM_PAGES, 2, 2, page_size, num_kv_heads, head_dim), torch.nan).to(device, kv_dtype)[:, 1]
    weights = [torch.rand(head_dim, generator=generator).add(0.5).to(device, dtype) for _ in range(2)]
    q_norm, k_norm = weights if norms else (None, None)
    return Case(
        fused.to(device, dtype),
        heads,
        torch.randint(40, shape, generator=generator).to(device),
        torch.cat((angles.cos(), angles.sin()), 1).to(device),
        kv,
        torch.randperm(NUM_PAGES * page_size, generator=generator)[:num_tokens].to(device),
        q_norm,
        k_norm,
    )


def assert_as_reference(case: Case, style: RotaryStyle = NEOX, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    fused, expected_fused, expected_kv = case.fused.clone(), case.fused.clone(), case.kv.clone()
    rest = (case.q_norm, case.k_norm, EPS, style, k_scale, v_scale)
    where = (case.positions, case.cos_sin)
    rope_store.rope_store(*case.qkv(fused), *where, case.kv, case.locations, *rest)
    reference.rope_store(*case.qkv(expected_fused), *where, expected_kv, case.locations, *rest)
    q, k, v = case.qkv(fused)
    dtype = q.dtype
    # The interpreter cuts off what does not fit into bfloat16 instead of rounding it.
    bits = torch.finfo(dtype).eps * (4 if dtype == torch.bfloat16 and q.device.type == "cpu" else 1)
    atol = max(bits * 4, 4e-6)
    expected_q = case.qkv(expected_fused)[0]
    torch.testing.assert_close(q.float(), expected_q.float(), atol=atol, rtol=bits + 2e-6)
    _, before_k, before_v = case.qkv(case.fused)
    assert torch.equal(k, before_k) and torch.equal(v, before_v)
    assert case.fused[:, -8:].isnan().all() and fused[:, -8:].isnan().all()
    assert_pages(case.kv, expected_kv, atol, bits + 2e-6)


def assert_pages(kv: Tensor, expected: Tensor, atol: float, rtol: float) -> None:
    """The same places are written, and alike; 8-bit numbers may be neighbours."""
    wide, expected_wide = kv.float(), expected.float()
    assert torch.equal(wide.isnan(), expected_wide.isnan())
    if kv.dtype.itemsize > 1:
        torch.testing.assert_close(wide, expected_wide, atol=atol, rtol=rtol, equal_nan=True)
        return
    written = ~expected_wide.isnan()
    same = kv.view(torch.uint8)[written] == expected.view(torch.uint8)[written]
    assert same.float().mean() > 0.99
    rtol = 0.13 if kv.dtype == torch.float8_e4m3fn else 0.26
    torch.testing.assert_close(wide[written], expected_wide[written], atol=0.002, rtol=rtol)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("heads", LAYOUTS)
def test_head_layouts(heads: tuple[int, int, int], norms: bool, device: torch.device) -> None:
    assert_as_reference(make_case(device, heads, num_tokens=2, norms=norms))


@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 4, 80)])
def test_large_programs(heads: tuple[int, int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope_store, "FEW_TOKENS", 0)
    assert_as_reference(make_case(device, heads, norms=True))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_page_sizes(page_size: int, num_tokens: int, device: torch.device) -> None:
    assert_as_reference(make_case(device, (4, 2, 16), page_size=page_size, num_tokens=num_tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norms", [False, True])
def test_two_byte_types(dtype: torch.dtype, norms: bool, device: torch.device) -> None:
    assert_as_reference(make_case(device, dtype=dtype, norms=norms))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [8, 32, 48, 64])
def test_partial_and_interleaved(rotary_dim: int, norms: bool, interleaved: bool, device: torch.device) -> None:
    case = make_case(device, (5, 2, 64), num_tokens=2, rotary_dim=rotary_dim, norms=norms)
    assert_as_reference(case, RotaryStyle(interleaved))


@pytest.mark.parametrize("interleaved", [False, True])
def test_axes(interleaved: bool, device: torch.device) -> None:
    axes = torch.tensor([0] * 8 + [1] * 12 + [2] * 12, device=device)
    assert_as_reference(make_case(device, axes=3, num_tokens=4), RotaryStyle(interleaved, axes))


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.03, 0.0001)])
def test_pages_of_another_type(kv_dtype: torch.dtype, scales: tuple[float, float], device: torch.device) -> None:
    case = make_case(device, dtype=torch.float32 if kv_dtype == torch.float16 else torch.float16, kv_dtype=kv_dtype)
    assert_as_reference(case, NEOX, *scales)


def test_keys_of_another_distance_than_queries(device: torch.device) -> None:
    """Not of one projection, heads apart, and tokens with their heads transposed."""
    case = make_case(device, (4, 2, 16))
    q, k, v = (part.clone() for part in case.qkv(case.fused))
    q = q.transpose(0, 1).contiguous().transpose(0, 1)
    k = k.repeat(1, 1, 2)[:, :, :16]
    expected_q, expected_kv = q.clone(), case.kv.clone()
    rest = (None, None, EPS)
    rope_store.rope_store(q, k, v, case.positions, case.cos_sin, case.kv, case.locations, *rest)
    reference.rope_store(expected_q, k, v, case.positions, case.cos_sin, expected_kv, case.locations, *rest)
    torch.testing.assert_close(q, expected_q)
    torch.testing.assert_close(case.kv, expected_kv, equal_nan=True)


def test_nothing(device: torch.device) -> None:
    case = make_case(device, num_tokens=0)
    rope_store.rope_store(*case.qkv(case.fused), case.positions, case.cos_sin, case.kv, case.locations, None, None, EPS)
    assert case.kv.isnan().all()
