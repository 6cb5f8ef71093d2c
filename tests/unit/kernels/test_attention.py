"""paged_attention against a plain per-row reference, over layouts, windows, masks, garbage pages and batch mixes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import (
    AttentionBatch,
    AttentionSpec,
    SharedPrefix,
    _prepare,
    _split_rows,
    merge_states,
    paged_attention,
)
from tests.support.attention_cases import LAYOUTS, Case, make_case, plain_attention, relative_error

HEADS, KV_HEADS, DIM = 6, 2, 16
ROWS = [(1, 40), (5, 5), (1, 1), (3, 33), (1, 300), (5, 64), (1, 17)]


def _assert_defined(out: Tensor, case: Case, spec: AttentionSpec) -> None:
    expected, _ = plain_attention(case, spec)
    torch.testing.assert_close(out, expected.float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_matches_reference(layout: str, page_size: int, window: int | None) -> None:
    case, spec = make_case(ROWS, page_size=page_size, layout=layout), AttentionSpec(0.3, window)
    _assert_defined(paged_attention(case.q, case.kv, case.batch, spec), case, spec)


@pytest.mark.parametrize("rows", [[(1, 9)] * 4, [(64, 64)], [(1, 1)], [(2, 300), (2, 20)]])
def test_single_group(rows: list[tuple[int, int]]) -> None:
    case, spec = make_case(rows), AttentionSpec(0.25)
    _assert_defined(paged_attention(case.q, case.kv, case.batch, spec), case, spec)


def test_row_does_not_depend_on_neighbours() -> None:
    case = make_case(ROWS)
    q, kv, batch = case.q, case.kv, case.batch
    together = paged_attention(q, kv, batch, AttentionSpec(0.3, None))
    starts = np.cumsum(batch.q_lens) - batch.q_lens
    for i, (q_len, length) in enumerate(ROWS):
        alone = AttentionBatch(
            batch.q_lens[i : i + 1], batch.kv_lens[i : i + 1], length, batch.page_table[i : i + 1], 16
        )
        rows = slice(int(starts[i]), int(starts[i]) + q_len)
        torch.testing.assert_close(
            paged_attention(q[rows], kv, alone, AttentionSpec(0.3, None)), together[rows], atol=1e-6, rtol=1e-5
        )


def test_long_rows_are_run_in_bounded_pieces() -> None:
    case, spec = make_case([(1, 9000)] * 5), AttentionSpec(0.3)
    _assert_defined(paged_attention(case.q, case.kv, case.batch, spec), case, spec)


@pytest.mark.parametrize("window", [None, 7])
def test_bounds_instead_of_lengths(window: int | None) -> None:
    """What runs on a device: lengths are known there only, so every row is padded to the bound."""
    case, spec = make_case(ROWS), AttentionSpec(0.3, window)
    batch, strides = case.batch, case.kv.stride()[:3]
    calls = _split_rows(batch, exact=False)
    assert len(calls) == 3
    batch.memo[window, strides] = tuple(_prepare(batch, *call, strides, window) for call in calls)
    _assert_defined(paged_attention(case.q, case.kv, batch, spec), case, spec)


def test_window_reads_nothing_outside_it() -> None:
    rows = [(3, 100), (1, 80)]
    case = make_case(rows, page_size=1)
    q, kv, batch = case.q, case.kv, case.batch
    expected = paged_attention(q, kv, batch, AttentionSpec(0.3, 8))
    fresh = AttentionBatch(batch.q_lens, batch.kv_lens, batch.max_kv_len, batch.page_table, 1)
    for row, (q_len, length) in enumerate(rows):
        kv[batch.page_table[row, : length - q_len - 8 + 1].long()] = torch.nan
    assert torch.equal(paged_attention(q, kv, fresh, AttentionSpec(0.3, 8)), expected)


def test_odd_strides_are_refused() -> None:
    base = torch.zeros(4 * 2 * 16 * KV_HEADS * DIM + 1000)
    kv = base.as_strided((4, 2, 16, KV_HEADS, DIM), (2 * 16 * 32 + 1, 16 * 32, 32, 16, 1))
    batch = AttentionBatch(np.ones(1, np.int32), torch.tensor([3]), 3, torch.zeros(1, 1, dtype=torch.int32), 16)
    with pytest.raises(ValueError, match="multiples of the token stride"):
        paged_attention(torch.zeros(1, HEADS, DIM), kv, batch, AttentionSpec(1.0))


MIXED = [(1, 40), (5, 5), (0, 0), (1, 17), (3, 33), (1, 0), (9, 300)]
SINKS = torch.linspace(-3.0, 9.0, HEADS)


def _check(case: Case, spec: AttentionSpec, tolerance: float = 1e-6) -> None:
    """Result, with lse and without, against the definition in float64."""
    expected, expected_lse = plain_attention(case, spec)
    lse = torch.full(case.q.shape[:2], torch.nan)
    out = paged_attention(case.q, case.kv, case.batch, spec, lse)
    assert out.dtype == case.q.dtype and relative_error(out, expected) < tolerance
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    without = paged_attention(case.q, case.kv, case.batch, spec)
    assert relative_error(without, expected) < tolerance


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
@pytest.mark.parametrize("tree", [False, True])
def test_scores_and_masks(window: int | None, softcap: float | None, sinks: Tensor | None, tree: bool) -> None:
    _check(make_case(MIXED, tree=tree), AttentionSpec(0.3, window, softcap, sinks))


@pytest.mark.parametrize("bounded", [False, True])
def test_trees_alone(bounded: bool) -> None:
    """All rows of one length, which need no choice of rows; and by bounds, as on a device."""
    case = make_case([(6, 40), (6, 6), (6, 90)], tree=True)
    for window in (None, 4):
        if bounded:
            strides = case.kv.stride()[:3]
            calls = _split_rows(case.batch, exact=False)
            case.batch.memo[window, strides] = tuple(_prepare(case.batch, *call, strides, window) for call in calls)
        _check(case, AttentionSpec(0.3, window))


def test_rows_of_nothing() -> None:
    case = make_case([(1, 0), (1, 0)])
    lse = torch.full((2, HEADS), torch.nan)
    out = paged_attention(case.q, case.kv, case.batch, AttentionSpec(0.3, sinks=SINKS), lse)
    assert not out.any() and lse.isneginf().all()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_pages(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """What is stored is taken times the scales."""
    case = make_case(MIXED, dtype=dtype, kv_dtype=kv_dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    for softcap in (None, 3.0):
        _check(case, AttentionSpec(0.3, softcap=softcap, k_scale=0.5, v_scale=3.0), tolerance)


def test_shared_prefix_is_a_hint() -> None:
    case = make_case([(1, 40), (2, 50), (1, 33)], prefix=[(2, 32), (1, 0)])
    assert isinstance(case.batch.prefix, SharedPrefix)
    _check(case, AttentionSpec(0.3))


@pytest.mark.parametrize("sinks", [None, SINKS], ids=["", "sinks"])
def test_merge_states(sinks: Tensor | None) -> None:
    """Attention over the first keys and over the others is attention over all; a part may be empty."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(4, HEADS, DIM, generator=generator)
    keys, values = torch.randn(2, 50, HEADS, DIM, generator=generator)
    scores = torch.einsum("qhd,khd->qhk", q, keys) * 0.3

    def part(first: int, last: int, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
        some = scores[..., first:last].double()
        lse = some.logsumexp(-1) if last > first else torch.full((4, HEADS), -torch.inf, dtype=torch.float64)
        total = lse if sink is None else torch.logaddexp(lse, sink.double())
        weights = (some - total.unsqueeze(-1)).exp()
        return torch.einsum("qhk,khd->qhd", weights, values[first:last].double()).float(), lse.float()

    for border in (0, 17, 50):
        (out_a, lse_a), (out_b, lse_b) = part(0, border), part(border, 50)
        # The results of an empty part stand for nothing.
        out_a = torch.full_like(out_a, 7.0) if border == 0 else out_a
        out, lse = merge_states(out_a, lse_a, out_b, lse_b, sinks)
        expected, expected_lse = part(0, 50, sinks)
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)


def test_merging_nothing() -> None:
    nothing, lse = torch.zeros(2, HEADS, DIM), torch.full((2, HEADS), -torch.inf)
    out, merged = merge_states(nothing, lse, nothing, lse)
    assert not out.any() and merged.isneginf().all()
