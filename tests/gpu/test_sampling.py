"""Draws, scores and changes of logits on a GPU, at real vocabulary sizes, against their torch references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import logits as logits_reference
from kernels import logprobs as logprobs_reference
from kernels import sampling as reference
from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from tests.unit.kernels.cuda.draws import (
    Parameters,
    assert_draws,
    edge_thresholds,
    parameters,
    scaled_logits,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")
SHAPES = [(256, 128256), (1, 151936), (1, 128256), (5, 32000), (3, 50257), (2, 262144)]
SETTINGS = [
    (1.0, -1, 1.0, 0.0),
    (1.0, 50, 0.9, 0.0),
    (0.6, -1, 0.9, 0.0),
    (0.0, 50, 0.9, 0.1),
    (0.7, 20, 0.8, 0.02),
    (1.5, -1, 0.99, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 1000, 1.0, 0.0),
    (1.0, 5000, 0.95, 0.0),
    (1.0, -1, 1.0, 0.05),
    (0.05, -1, 1e-6, 0.0),
]


def _case(
    rows: int, vocab: int, dtype: torch.dtype, settings: list[tuple[float, int, float, float]], spread: float = 3.0
) -> tuple[Tensor, Parameters]:
    """Rows of normal logits, every third with some tokens that stand out; views of wider rows full of NaN."""
    torch.manual_seed(vocab + rows)
    wide = torch.full((rows, vocab + 16), torch.nan, device=CUDA, dtype=dtype)
    logits = wide[:, :vocab]
    logits.copy_(torch.randn(rows, vocab, device=CUDA) * spread)
    logits[::3, torch.randperm(vocab, device=CUDA)[:40]] += 12
    generator = torch.Generator().manual_seed(rows)
    return logits, parameters([settings[row % len(settings)] for row in range(rows)], CUDA, generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), SHAPES)
def test_draws(rows: int, vocab: int, dtype: torch.dtype) -> None:
    from kernels.cuda.sampling import argmax_rows, sample

    for settings in (SETTINGS, SETTINGS[1:2], SETTINGS[2:3], SETTINGS[:1]) if rows < 256 else (SETTINGS,):
        logits, params = _case(rows, vocab, dtype, settings)
        drawn = sample(logits, *params.all(), needs_filter=True, all_greedy=False)
        assert_draws(logits, params, drawn)
        again = sample(
            logits[-1:].clone(), *params.at(slice(rows - 1, rows)).all(), needs_filter=True, all_greedy=False
        )
        assert torch.equal(again, drawn[-1:])
    logits, params = _case(rows, vocab, dtype, [(1.0, -1, 1.0, 0.0), (0.5, -1, 1.0, 0.0), (0.0, -1, 1.0, 0.0)])
    drawn = sample(logits, *params.all(), needs_filter=False, all_greedy=False)
    assert_draws(logits, params, drawn, filtered=False)
    assert torch.equal(argmax_rows(logits), reference.argmax_rows(logits))
    logits[0, vocab - 1] = torch.nan
    assert int(argmax_rows(logits)[0]) == -1
    assert int(sample(logits, *params.all(), needs_filter=False, all_greedy=False)[0]) == -1


@pytest.mark.parametrize("spread", [0.0, 1e-3, 0.3])
def test_flat_rows(spread: float) -> None:
    from kernels.cuda.sampling import sample

    settings = [(1.0, -1, 0.9, 0.0), (1.0, 60000, 1.0, 0.0), (1.0, 60000, 0.5, 0.0), (1.0, -1, 0.1, 0.0)]
    for dtype in (torch.bfloat16, torch.float32):
        logits, params = _case(8, 128256, dtype, settings, spread)
        logits[:4] = torch.randn(4, 128256, device=CUDA) * spread
        assert_draws(logits, params, sample(logits, *params.all(), needs_filter=True, all_greedy=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_candidates_in_any_order_and_number(dtype: torch.dtype) -> None:
    """Appended in another order each time, or too many to be kept: the draw is the same."""
    from kernels.cuda.sampling import draw

    settings = [(0.8, -1, 0.95, 0.0), (1.0, 50, 0.9, 0.0), (0.9, 3000, 0.9, 0.0), (1.0, -1, 1.0, 0.05)]
    logits, params = _case(32, 128256, dtype, settings, 2.5)
    drawn = draw(logits, params.all(), needs_filter=True)
    assert_draws(logits, params, drawn)
    for capacity in (16384, 16384, 1024, 16):
        assert torch.equal(draw(logits, params.all(), needs_filter=True, capacity=capacity), drawn)


@pytest.mark.parametrize("settings", [(1.0, -1, 1.0, 0.0), (2.0, 3, 1.0, 0.0), (1.0, -1, 0.8, 0.0)])
def test_distribution(settings: tuple[float, int, float, float]) -> None:
    from kernels.cuda.sampling import sample

    rows = 20_000
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0, 0.0, -1.0, 1.5, 0.2]], device=CUDA)
    params = parameters([settings], CUDA, torch.Generator())
    kept = scaled_logits(logits, params.temperature)
    kept = kept.masked_fill(kept < reference.filter_thresholds(kept, *params.filters()[1:]).unsqueeze(1), -torch.inf)
    params = parameters([settings] * rows, CUDA, torch.Generator().manual_seed(5))
    drawn = sample(logits.expand(rows, -1), *params.all(), needs_filter=True, all_greedy=False)
    expected = kept[0].softmax(-1).double() * rows
    counts = torch.bincount(drawn.long(), minlength=8).double()
    possible = expected > 0
    assert not bool(counts[~possible].any())
    # 99.9th percentile of chi-square with 7 degrees of freedom.
    assert float(((counts - expected) ** 2 / expected)[possible].sum()) < 24.3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(64, 128256), (1, 151936), (3, 50257)])
def test_processed(rows: int, vocab: int, dtype: torch.dtype) -> None:
    from kernels.cuda.logprobs import processed_logits

    logits, params = _case(rows, vocab, dtype, SETTINGS)
    got = processed_logits(logits, *params.filters(), needs_filter=True)
    expected = logprobs_reference.processed_logits(logits, *params.filters(), needs_filter=True)
    scaled = scaled_logits(logits, params.temperature)
    _, one, other = edge_thresholds(scaled, params)
    high, low = torch.maximum(one, other).unsqueeze(1), torch.minimum(one, other).unsqueeze(1)
    # log(min_p) may differ in its last bit.
    slack = 1e-5 * scaled.abs().amax(dim=1, keepdim=True)
    edge = (scaled <= high + slack) & (scaled >= low - slack)
    assert bool(((got == expected) | edge).all())
    assert bool(((got == scaled) | (got == -torch.inf)).all())
    plain = processed_logits(logits, *params.filters(), needs_filter=False)
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "vocab"), [(256, 128256), (1, 151936), (3, 50257)])
def test_scores(rows: int, vocab: int, dtype: torch.dtype) -> None:
    from kernels.cuda.logprobs import score_tokens

    logits, _ = _case(rows, vocab, dtype, SETTINGS)
    logits[0] = 1.5
    tokens = torch.randint(0, vocab, (rows,), device=CUDA)
    for width in (0, 1, 5, 20, 128):
        chosen, ids, tops = score_tokens(logits, tokens, width)
        expected = logprobs_reference.score_tokens(logits, tokens, width)
        assert torch.equal(ids, expected[1])
        torch.testing.assert_close(chosen, expected[0], atol=3e-5, rtol=1e-6)
        torch.testing.assert_close(tops, expected[2], atol=3e-5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changed_logits(dtype: torch.dtype) -> None:
    from kernels.cuda.logits import adjust_logits, mask_logits

    rows, vocab, entries = 64, 128256, 70
    logits, _ = _case(rows, vocab, dtype, SETTINGS)
    every = torch.randperm(rows, device=CUDA)
    counts = torch.randint(0, 3, (entries, vocab), device=CUDA, dtype=torch.int32)
    counts *= torch.rand(entries, vocab, device=CUDA) < 0.05
    penalties = PenaltyTable(
        torch.rand(entries, device=CUDA) + 0.6,
        torch.randn(entries, device=CUDA),
        torch.randn(entries, device=CUDA),
        torch.rand(entries, vocab, device=CUDA) < 0.05,
        counts,
    )
    ids = torch.stack([torch.randperm(vocab, device=CUDA)[:300] for _ in range(entries)])
    values = torch.randn(entries, 300, device=CUDA) * 10
    ids[:, 200:], values[:, 200:] = 0, -0.0
    ends = ids[:, [0, 1, 1, 5]].contiguous()
    edits = EditTable(ids, values, ends, torch.randint(0, 2, (entries,), device=CUDA) * 20)
    adjusted = AdjustedRows(every, every + 3, every.flip(0), every + 6)
    kv_lens = torch.full((rows,), 10, device=CUDA)
    expected = logits.clone()
    logits_reference.adjust_logits(expected, kv_lens, penalties, edits, adjusted)
    adjust_logits(logits, kv_lens, penalties, edits, adjusted)
    assert torch.equal(logits, expected)
    bitmask = torch.randint(-(2**31), 2**31, (entries, vocab // 32), device=CUDA).int()
    logits_reference.mask_logits(expected, bitmask, every[:40], every[:40] + 5)
    mask_logits(logits, bitmask, every[:40], every[:40] + 5)
    assert torch.equal(logits, expected)


def test_captured_in_a_graph() -> None:
    from kernels.cuda.sampling import advance, sample

    logits, params = _case(11, 32000, torch.bfloat16, SETTINGS)
    last, rows = torch.zeros(20, dtype=torch.int64, device=CUDA), torch.arange(11, device=CUDA) + 3
    expected = sample(logits, *params.all(), needs_filter=True, all_greedy=False)
    advance(last, rows, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = sample(logits, *params.all(), needs_filter=True, all_greedy=False)
        advance(last, rows, drawn)
    last.zero_()
    graph.replay()
    assert torch.equal(drawn, expected)
    assert torch.equal(last[3:14], expected.long())
