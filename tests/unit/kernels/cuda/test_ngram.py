"""Trees of n-gram drafts in Triton, against kernels.ngram."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda import ngram
from tests.unit.kernels.ngram_cases import NgramCase

SEEDS = [seed if seed < 10 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(200)]


@pytest.mark.parametrize("seed", SEEDS)
def test_trees(seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "TEXT_BLOCK", (16, 1024)[seed % 2])
    case = NgramCase(seed).on(device)
    wanted = case.drafts()
    found = ngram.ngram_tree(case.texts, case.seq_len, case.rows, case.num_drafts, case.search, 0, case.corpus)
    assert torch.equal(found.tokens, wanted.tokens)
    assert (found.parents is None) == (wanted.parents is None)
    if found.parents is not None and wanted.parents is not None:
        assert torch.equal(found.parents, wanted.parents)


def test_nobody_wants_drafts(device: torch.device) -> None:
    case = NgramCase(1, branches=2).on(device)
    drafts = ngram.ngram_tree(case.texts, case.seq_len, case.rows[:0], 4, case.search, 0, case.corpus)
    assert drafts.tokens.shape == (0, 4) and drafts.parents is not None
