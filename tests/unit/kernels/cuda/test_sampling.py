"""Draws against the reference's, in float64; filters, ties, flat rows, NaN, infinities; a row is nobody's neighbour."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import sampling as reference
from kernels.cuda import sampling_summary
from kernels.cuda.sampling import advance, argmax_rows, draw, sample
from tests.unit.kernels.cuda.draws import Parameters, assert_draws, parameters

INF = torch.inf
MIXED = [
    (0.0, 5, 0.5, 0.1),
    (1.0, -1, 1.0, 0.0),
    (0.7, 50, 0.9, 0.0),
    (1.3, 1, 1.0, 0.0),
    (0.5, -1, 0.8, 0.0),
    (2.0, 0, 1.0, 0.05),
    (1.0, 40, 0.95, 0.02),
    (0.9, 10**6, 1e-9, 0.0),
]


def _draw(logits: Tensor, params: Parameters, *, needs_filter: bool = True, all_greedy: bool = False) -> Tensor:
    return sample(logits, *params.all(), needs_filter=needs_filter, all_greedy=all_greedy)


def _case(
    rows: list[tuple[float, int, float, float]], vocab: int, device: torch.device, spread: float = 3.0
) -> tuple[Tensor, Parameters]:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(len(rows), vocab, generator=generator) * spread
    return logits.to(device), parameters(rows, device, generator)


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.float16), (7, torch.bfloat16), (1000, torch.bfloat16), (300, torch.float32)]
)
def test_mixed_rows(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    logits, params = _case(MIXED, vocab, device)
    logits = logits.to(dtype)
    before = logits.clone()
    assert_draws(logits, params, _draw(logits, params))
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("vocab", "dtype", "spread"), [(7, torch.float32, 0.1), (4099, torch.float16, 5.0), (300, torch.float32, 0.0)]
)
def test_unfiltered_rows(vocab: int, dtype: torch.dtype, spread: float, device: torch.device) -> None:
    logits, params = _case([(1.0, -1, 1.0, 0.0), (0.3, 7, 0.5, 0.5), (0.0, -1, 1.0, 0.0)], vocab, device, spread)
    logits = logits.to(dtype)
    drawn = _draw(logits, params, needs_filter=False)
    assert_draws(logits, params, drawn, filtered=False)
    assert int(drawn[2]) == int(reference.argmax_rows(logits)[2])


@pytest.mark.parametrize("needs_filter", [False, True])
def test_chunks_of_several_tiles(needs_filter: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0.8, 20, 0.95, 0.0), (0.0, -1, 1.0, 0.0), (1.0, -1, 1.0, 0.0)]
    logits, params = _case(rows, 6200, device)
    logits = logits.to(torch.bfloat16)
    by_parts = _draw(logits, params, needs_filter=needs_filter)
    assert_draws(logits, params, by_parts, filtered=needs_filter)
    monkeypatch.setattr(sampling_summary, "_FEW_PROGRAMS", 0)
    monkeypatch.setattr(sampling_summary, "_SMALL_PROGRAMS", 6)
    assert torch.equal(_draw(logits, params, needs_filter=needs_filter), by_parts)


def test_no_rows(device: torch.device) -> None:
    logits, params = _case([(1.0, -1, 1.0, 0.0)], 50, device)
    assert _draw(logits[:0], params.at(slice(0, 0))).shape == (0,)
    assert argmax_rows(logits[:0]).shape == (0,)


@pytest.mark.parametrize("spread", [0.0, 0.02])
def test_flat_rows(spread: float, device: torch.device) -> None:
    rows = [(1.0, 2500, 1.0, 0.0), (0.5, 3000, 0.5, 0.0), (1.0, -1, 0.2, 0.0)]
    rows = rows[1:2] if spread == 0 else rows
    logits, params = _case(rows, 2100, device, spread)
    assert_draws(logits, params, _draw(logits, params))


def test_more_candidates_than_fit(device: torch.device) -> None:
    rows = [(1.0, 40, 1.0, 0.0), (0.9, 300, 0.9, 0.0), (1.0, -1, 0.9, 0.0), (2.0, -1, 1.0, 0.01), (1.0, 3, 1.0, 0.0)]
    logits, params = _case(rows, 2100, device)
    logits = logits.to(torch.float16)
    drawn = draw(logits, params.all(), needs_filter=True, capacity=16)
    assert_draws(logits, params, drawn)
    assert torch.equal(drawn, _draw(logits, params))


def test_an_order_that_deceives(device: torch.device) -> None:
    """The tokens that stand for their spans are the rarest, so that the bounds are too high."""
    logits, params = _case([(1.0, -1, 0.9, 0.0), (1.0, 1500, 1.0, 0.0), (1.0, 1500, 1.0, 0.0)], 2100, device, 0.5)
    first_of_spans = [*range(0, 128, 4), *range(2048, 2100, 4)]
    logits[:2, first_of_spans] = -20.0
    logits[2, first_of_spans] = 20.0
    assert_draws(logits, params, _draw(logits, params))


def test_equal_candidates_everywhere(device: torch.device) -> None:
    """Which comes first in the list of candidates must not matter."""
    logits, params = _case([(1.0, 5, 0.9, 0.0)] * 2, 4099, device, 0.0)
    logits[:, [5, 2050, 4097, 4098, 70, 2049]] = 9.0
    logits[1, 2051] = INF
    logits[1, 4090] = INF
    drawn = _draw(logits, params)
    assert_draws(logits[:1], params.at(slice(0, 1)), drawn[:1])
    assert int(drawn[1]) == 2051


def test_ties_with_the_last_one_kept(device: torch.device) -> None:
    logits = torch.zeros(4, 300, device=device)
    logits[:, ::3] = 2.0
    logits[:, 0] = 3.0
    # Both zeros are the same value.
    logits[3] = torch.where(torch.arange(300, device=device) % 2 == 0, 0.0, -0.0)
    logits[3, 7] = 1.0
    generator = torch.Generator().manual_seed(1)
    rows = [(1.0, 2, 1.0, 0.0), (1.0, 5, 0.3, 0.0), (1.0, -1, 0.05, 0.0), (1.0, 2, 0.9, 0.0)]
    params = parameters(rows, device, generator)
    assert_draws(logits, params, _draw(logits, params))


def test_few_possible_tokens(device: torch.device) -> None:
    logits, params = _case([MIXED[1], MIXED[2], MIXED[4], MIXED[5], MIXED[2]], 2500, device)
    logits[:4] = -INF
    logits[:3, 2100] = -1e4
    logits[1, [3, 5]] = -1e4
    logits[4, 100:] = -INF
    drawn = _draw(logits, params)
    assert_draws(logits, params, drawn)
    # All are -inf: the first, as in the reference.
    assert int(drawn[3]) == 0 == int(reference.sample(logits, *params.all(), needs_filter=True, all_greedy=False)[3])


@pytest.mark.parametrize("needs_filter", [False, True])
def test_nan_and_infinity(needs_filter: bool, device: torch.device) -> None:
    rows = [MIXED[0], MIXED[2], MIXED[1], MIXED[2], MIXED[2]]
    logits, params = _case(rows, 2100, device)
    logits[:2, 2090] = torch.nan
    logits[:2, 5] = INF
    logits[2:4, [2060, 2080]] = INF
    drawn = _draw(logits, params, needs_filter=needs_filter)
    assert drawn[:4].tolist() == [-1, -1, 2060, 2060]
    expected = reference.sample(logits, *params.all(), needs_filter=needs_filter, all_greedy=False)
    assert drawn[:4].tolist() == expected[:4].tolist()
    assert_draws(logits[4:], params.at(slice(4, 5)), drawn[4:], filtered=needs_filter)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    rows = [MIXED[0], MIXED[1], MIXED[2], MIXED[4]]
    logits, params = _case(rows, 2100, device)
    wide = torch.full((4, 2200), torch.nan, device=device)
    wide[:, :2100] = logits
    together = _draw(wide[:, :2100], params)
    order = torch.tensor([2, 0, 3], device=device)
    assert torch.equal(_draw(logits[order], params.at(order)), together[order])
    everyone = _draw(logits[1:2].expand(2, -1), params.at(torch.tensor([1, 1], device=device)))
    assert everyone.tolist() == [int(together[1])] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_argmax(dtype: torch.dtype, device: torch.device) -> None:
    logits = torch.randn(7, 2100, generator=torch.Generator().manual_seed(3)).round().to(device, dtype)
    logits[1] = 0.0
    logits[2] = torch.where(torch.arange(2100, device=device) % 2 == 0, -0.0, 0.0)
    logits[3] = -INF
    logits[4, 2099] = torch.nan
    logits[4, 3] = INF
    logits[5, [2070, 2097]] = INF
    logits[6, :] = torch.nan
    assert argmax_rows(logits).tolist() == reference.argmax_rows(logits).tolist()
    assert argmax_rows(logits).dtype == torch.int32
    greedy = Parameters(*(torch.zeros(7, device=device),) * 6)
    assert torch.equal(_draw(logits, greedy, all_greedy=True), argmax_rows(logits))
    columns = logits[:2, 1:200]
    assert argmax_rows(columns).tolist() == reference.argmax_rows(columns).tolist()


def test_advance(device: torch.device) -> None:
    last = torch.arange(300, device=device)
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(0))[:150].to(device)
    drawn = torch.arange(-1, 149, dtype=torch.int32, device=device)
    expected = last.clone()
    reference.advance(expected, rows, drawn)
    advance(last, rows, drawn)
    assert torch.equal(last, expected)
    advance(last, rows[:0], drawn[:0])
    assert torch.equal(last, expected)
