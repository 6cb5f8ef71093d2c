"""Log probabilities by the CPU kernels against float64 softmax and the torch reference; ties, NaN, infinities."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels.cpu import logprobs as kernels
from kernels.logprobs import score_tokens as reference
from tests.support.packed import every_isa, needs_kernels, using

pytestmark = needs_kernels
every_count = pytest.mark.parametrize("threads", [1, 2, 3])

inf, nan = math.inf, math.nan


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a kernel leaves unwritten is NaN, or no id."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full(shape, nan if dtype == torch.float32 else -77, dtype=dtype)

    monkeypatch.setattr(kernels, "empty", empty)
    yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check(logits: Tensor, tokens: Tensor, width: int) -> None:
    chosen, ids, tops = kernels.score_tokens(logits, tokens, width)
    exact = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), exact.gather(1, tokens[:, None])[:, 0], atol=2e-6, rtol=2e-6)
    _, expected_ids, _ = reference(logits, tokens, width)
    assert torch.equal(ids, expected_ids)
    assert tops.shape == ids.shape == (len(logits), width)
    torch.testing.assert_close(tops.double(), exact.gather(1, ids), atol=2e-6, rtol=2e-6)


@every_isa
@every_count
@pytest.mark.parametrize("vocab", [1, 5, 16, 17, 64, 65, 1000, 4097, 49152])
def test_against_the_definition(isa: str, threads: int, vocab: int) -> None:
    rows = 7 if vocab < 49152 else 3
    tokens = torch.randint(0, vocab, (rows,), generator=torch.Generator().manual_seed(0))
    with using(isa, threads):
        for spread in (0.01, 3.0, 40.0):
            wide = randn(rows, vocab + 3, seed=vocab) * spread
            for width in {0, 1, min(5, vocab), min(20, vocab), min(vocab, 900), vocab // 2}:
                check(wide[:, :vocab], tokens, width)
        if vocab <= 1000:
            check(wide[:, :vocab], tokens, vocab)


@every_isa
@pytest.mark.parametrize("width", [1, 4, 20, 64, 2000])
def test_ties_take_the_lowest_ids(isa: str, width: int) -> None:
    coarse = (randn(8, 2000, seed=1) * 2).round()
    coarse[1] = 0.0
    coarse[2] = torch.where(torch.arange(2000) % 2 == 0, 0.0, -0.0)
    coarse[3] = -inf
    coarse[3, [7, 3, 1999]] = 1.0
    coarse[4] = -inf
    coarse[4, 1001] = -1e30
    coarse[5, ::2] = -inf
    with using(isa):
        check(coarse, torch.tensor([0, 1999, 5, 3, 1001, 4, 6, 7]), width)


@every_isa
def test_a_row_depends_on_itself_alone(isa: str) -> None:
    logits = randn(9, 5000, seed=2)
    logits[4, 4999] = nan
    tokens = torch.arange(9)
    with using(isa, threads=3):
        together = kernels.score_tokens(logits, tokens, 7)
    assert together[0].isnan().tolist() == [i == 4 for i in range(9)]
    for threads in (1, 2):
        with using(isa, threads):
            for row in range(9):
                alone = kernels.score_tokens(logits[row : row + 1], tokens[row : row + 1], 7)
                for one, all_rows in zip(alone, together, strict=True):
                    assert torch.equal(one[0].nan_to_num(nan=99.0), all_rows[row].nan_to_num(nan=99.0))


@every_isa
def test_rows_without_logprobs(isa: str) -> None:
    """A NaN, and infinities that make one, show as NaN in all logprobs of their row."""
    logits = torch.zeros(4, 300)
    logits[0, 299] = nan
    logits[1, 20] = inf
    logits[2] = -inf
    tokens = torch.tensor([1, 1, 1, 1])
    with using(isa):
        for width in (0, 3, 300):
            chosen, ids, tops = kernels.score_tokens(logits, tokens, width)
            assert chosen.isnan().tolist() == [True, True, True, False]
            assert bool(tops[:3].isnan().all()) and not bool(tops[3].isnan().any())
            assert bool(((ids >= 0) & (ids < 300)).all())
            assert torch.equal(ids[1:], reference(logits, tokens, width)[1][1:])


@every_isa
def test_types_and_strides_of_arguments(isa: str) -> None:
    wide = randn(6, 80)
    tokens = torch.tensor([3, 1, 4, 1, 5, 39])
    with using(isa):
        plain = kernels.score_tokens(wide[:, ::2].contiguous(), tokens, 4)
        copies = torch.stack([tokens.int(), tokens.int()], dim=1)[:, 0]
        for one, other in zip(kernels.score_tokens(wide[:, ::2], copies, 4), plain, strict=True):
            assert torch.equal(one, other)
        chosen, ids, tops = kernels.score_tokens(wide[:0], tokens[:0], 4)
        assert (chosen.shape, ids.shape, tops.shape) == ((0,), (0, 4), (0, 4))
    assert torch.equal(wide, randn(6, 80))
