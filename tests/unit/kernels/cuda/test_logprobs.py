"""Log probabilities, the largest in order, and what the filters leave, against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernels import logprobs as reference
from kernels.cuda.logprobs import processed_logits, score_among, score_tokens
from kernels.cuda.sampling_candidates import CAPACITY
from tests.unit.kernels.cuda.draws import Parameters, edge_thresholds, parameters, scaled_logits

INF = torch.inf


def _check_scores(logits: Tensor, tokens: Tensor, width: int, capacity: int = CAPACITY) -> None:
    chosen, ids, tops = score_among(logits, tokens, width, capacity=capacity)
    expected, expected_ids, expected_tops = reference.score_tokens(logits, tokens, width)
    assert chosen.dtype == tops.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    for got, wanted in ((chosen, expected), (tops, expected_tops)):
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("vocab", "dtype", "width"),
    [
        (1, torch.float32, 0),
        (1, torch.float32, 1),
        (7, torch.float16, 7),
        (1000, torch.float32, 1),
        (1000, torch.bfloat16, 20),
        (300, torch.float32, 128),
        (4099, torch.float16, 5),
    ],
)
def test_scores(vocab: int, dtype: torch.dtype, width: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab + width)
    spread = torch.tensor([[0.1], [30.0]])
    logits = (torch.randn(2, vocab, generator=generator) * spread).to(device, dtype)
    _check_scores(logits, torch.randint(0, vocab, (2,), generator=generator).to(device), width)


@pytest.mark.parametrize("capacity", [16, 400])
def test_more_candidates_than_fit(capacity: int, device: torch.device) -> None:
    logits = torch.randn(2, 2100, generator=torch.Generator().manual_seed(0)).to(device)
    logits[:, ::7] = 1.0
    _check_scores(logits, torch.tensor([3, 299], device=device), 3, capacity)


def test_widths_that_torch_sorts(device: torch.device) -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(0)).to(device)
    _check_scores(logits, torch.tensor([3, 299], device=device), 300)


def test_ties_take_the_lowest_ids(device: torch.device) -> None:
    coarse = (torch.randn(5, 2200, generator=torch.Generator().manual_seed(1)) * 2).round()
    coarse[1] = 0.0
    coarse[2] = torch.where(torch.arange(2200) % 2 == 0, 0.0, -0.0)
    coarse[3, :] = -INF
    coarse[3, [7, 3, 2199]] = 1.0
    coarse[4, :2100] = -5.0
    coarse[4, 2100:] = 4.0
    coarse[4, 2] = 6.0
    _check_scores(coarse.to(device), torch.tensor([0, 2199, 5, 3, 4], device=device), 5)


def test_rows_without_finite_scores(device: torch.device) -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(device)
    logits[0, 200] = torch.nan
    logits[1, [9, 4]] = INF
    logits[2] = -INF
    logits[3] = torch.nan
    tokens = torch.tensor([0, 4, 5, 3, 4], device=device)
    chosen, ids, tops = score_tokens(logits, tokens, 4)
    assert chosen.isnan().tolist() == [True, True, True, True, False]
    assert bool(tops[:4].isnan().all()) and bool(tops[4].isfinite().all())
    assert ids[[0, 2, 3]].tolist() == [[0, 1, 2, 3]] * 3
    assert ids[1, :2].tolist() == [4, 9]
    _check_scores(logits[4:], tokens[4:], 4)
    assert [part.shape for part in score_tokens(logits[:0], tokens[:0], 2)] == [(0,), (0, 2), (0, 2)]


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    wide = torch.randn(3, 700, generator=torch.Generator().manual_seed(2)).to(device)
    logits, tokens = wide[:, :600], torch.arange(3, device=device)
    together = score_tokens(logits, tokens, 7)
    for row in range(3):
        alone = score_tokens(logits[row : row + 1].clone(), tokens[row : row + 1], 7)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])


def _check_processed(logits: Tensor, params: Parameters) -> None:
    got = processed_logits(logits, *params.filters(), needs_filter=True)
    expected = reference.processed_logits(logits, *params.filters(), needs_filter=True)
    assert got.dtype == torch.float32
    scaled = scaled_logits(logits, params.temperature)
    # The reference's bits wherever it has them; a token on the edge of top-p may be in or out.
    differs = ~((got == expected) | (got.isnan() & expected.isnan()))
    _, below, above = edge_thresholds(scaled, params)
    high, low = torch.maximum(below, above).unsqueeze(1), torch.minimum(below, above).unsqueeze(1)
    assert not bool((differs & ((scaled > high) | (scaled < low) | (params.top_p >= 1).unsqueeze(1))).any())
    assert bool(((got == scaled) | (got == -INF) | got.isnan()).all())


SETTINGS = [
    (1.0, 1, 1.0, 0.0),
    (0.7, 3, 0.3, 0.0),
    (1.0, 40, 0.9, 0.2),
    (2.0, 300, 0.9, 0.0),
    (1.0, 700, 1.0, 0.0),
    (1.0, -1, 0.0, 0.0),
    (1.0, 10**6, 0.9, 0.0),
    (0.1, -1, 0.999, 0.0),
    (1.0, 0, 1.0, 1.0),
    (0.0, 3, 0.5, 0.5),
    (1.0, -1, 1.0, 0.0),
]


@pytest.mark.parametrize(("vocab", "spread"), [(600, 0.05), (600, 6.0)])
def test_processed(vocab: int, spread: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(len(SETTINGS), vocab, generator=generator) * spread).to(device)
    _check_processed(logits, parameters(SETTINGS, device, generator))


def test_processed_without_filters_and_of_short_floats(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    params = parameters([(0.0, 3, 0.5, 0.0), (0.3, 3, 0.5, 0.0), (1.0, -1, 1.0, 0.0)], device, generator)
    logits = torch.randn(3, 999, generator=generator).to(device, torch.float16)[:, :777]
    got = processed_logits(logits, *params.filters(), needs_filter=False)
    assert torch.equal(got, reference.processed_logits(logits, *params.filters(), needs_filter=False))
    _check_processed(logits, params)
    assert processed_logits(logits[:0], *params.at(slice(0, 0)).filters(), needs_filter=True).shape == (0, 777)


def test_processed_nan_and_infinity(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [(1.0, 5, 0.9, 0.0), (1.0, 5, 0.9, 0.1), (1.0, -1, 0.9, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 5, 0.9, 0.0)]
    logits = torch.randn(5, 300, generator=generator).to(device)
    logits[:2, [7, 9]] = INF
    logits[2, 3] = torch.nan
    logits[3] = -INF
    logits[4, 3:] = -INF
    _check_processed(logits, parameters(rows, device, generator))


def test_min_p_by_hand(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]], device=device)
    params = parameters([(2.0, -1, 1.0, math.exp(-0.6))], device, torch.Generator())
    assert processed_logits(logits, *params.filters(), needs_filter=True).tolist() == [[1.0, 0.5, -INF, -INF]]
