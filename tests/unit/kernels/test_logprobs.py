"""Logprobs against float64 softmax and Python's sort; filters against what is left of the vocabulary; ties and NaN."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.logprobs import processed_logits, score_tokens


def naive(logits: Tensor, token: int, width: int) -> tuple[float, list[int], list[float]]:
    values = [float(x) for x in logits]
    most = max(values)
    total = most + math.log(math.fsum(math.exp(x - most) for x in values))
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:width]
    return values[token] - total, order, [values[i] - total for i in order]


def check(logits: Tensor, tokens: list[int], width: int) -> None:
    chosen, ids, tops = score_tokens(logits, torch.tensor(tokens), width)
    assert ids.shape == tops.shape == (len(tokens), width)
    for row, token in enumerate(tokens):
        expected = naive(logits[row], token, width)
        assert float(chosen[row]) == pytest.approx(expected[0], abs=2e-5)
        assert ids[row].tolist() == expected[1]
        np.testing.assert_allclose(tops[row].numpy(), expected[2], atol=2e-5)


@pytest.mark.parametrize("width", [0, 1, 5, 300])
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_against_the_definition(width: int, spread: float) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(3)) * spread
    check(logits, [0, 299, 17, int(logits[3].argmax()), 5, 6], width)


@pytest.mark.parametrize("width", [1, 4, 20, 64])
def test_ties_take_the_lowest_ids(width: int) -> None:
    coarse = (torch.randn(8, 2000, generator=torch.Generator().manual_seed(1)) * 2).round()
    coarse[1] = 0.0
    coarse[2] = torch.where(torch.arange(2000) % 2 == 0, 0.0, -0.0)
    coarse[3, :] = -torch.inf
    coarse[3, [7, 3, 1999]] = 1.0
    check(coarse, [0, 1999, 5, 3, 4, 5, 6, 7], width)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(9, 5000, generator=torch.Generator().manual_seed(2))
    tokens = torch.arange(9)
    together = score_tokens(logits, tokens, 7)
    for row in range(9):
        alone = score_tokens(logits[row : row + 1], tokens[row : row + 1], 7)
        for one, all_rows in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_rows[row])


def test_nan_shows_in_its_row_only() -> None:
    logits = torch.zeros(2, 50)
    logits[0, 20] = torch.nan
    chosen, _, _ = score_tokens(logits, torch.tensor([0, 0]), 3)
    assert chosen.isnan().tolist() == [True, False]


def test_processed_logits_of_each_kind_of_row() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(5, 1)
    got = processed_logits(
        logits,
        temperature=torch.tensor([0.5, 0.0, 1.0, 1.0, 2.0]),
        top_k=torch.tensor([-1, 1, 2, -1, -1]),
        top_p=torch.tensor([1.0, 0.1, 1.0, 0.6, 1.0]),
        min_p=torch.tensor([0.0, 1.0, 0.0, 0.0, math.exp(-0.6)]),
        needs_filter=True,
    )
    inf = torch.inf
    assert got.tolist() == [
        [4.0, 2.0, 0.0, -2.0],
        [2.0, 1.0, 0.0, -1.0],
        [2.0, 1.0, -inf, -inf],
        [2.0, -inf, -inf, -inf],
        [1.0, 0.5, -inf, -inf],
    ]
    chosen, ids, tops = score_tokens(got[2:3], torch.tensor([1]), 3)
    both = math.log(math.exp(2) + math.exp(1))
    assert ids.tolist() == [[0, 1, 2]]
    assert float(chosen[0]) == pytest.approx(1 - both, abs=1e-6)
    assert tops[0].tolist() == [pytest.approx(2 - both, abs=1e-6), pytest.approx(1 - both, abs=1e-6), -inf]


def test_logits_stay_as_they_were() -> None:
    logits = torch.randn(3, 40)
    before = logits.clone()
    score_tokens(logits, torch.tensor([1, 2, 3]), 4)
    one = torch.ones(3)
    processed_logits(logits, one, torch.tensor([2, 2, 2]), one, one * 0, needs_filter=True)
    assert torch.equal(logits, before)
