"""Logprobs of a step: of the tokens it drew, and of prompt tokens in its chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from scheduler_proc.plan import StepPlan, TokenScores

PIECE_ROWS = 32
"""Rows whose logprobs are worked out at a time: each takes a few vectors as wide as the vocabulary."""


def scored_rows(plan: StepPlan) -> np.ndarray:
    """intp: which of the plan's sampling rows want logprobs, counted among those that sample."""
    assert plan.logprobs is not None
    return np.flatnonzero(plan.logprobs[plan.sample] >= 0)


def spread(plan: StepPlan, found: TokenScores) -> TokenScores:
    """Scores of `scored_rows` put where the plan has those rows; zeros elsewhere."""
    rows = np.flatnonzero(plan.sample)[scored_rows(plan)]
    num, width = len(plan.rows), found.ids.shape[1]
    scores = _empty(num, width, 0.0)
    scores.chosen[rows] = found.chosen
    scores.ids[rows] = found.ids
    scores.tops[rows] = found.tops
    return scores


def score_in_pieces(
    kernels: KernelSet, logits_of: Callable[[int, int], Tensor], tokens: Tensor, width: int
) -> TokenScores:
    """Scores of `tokens` (int64 [m]), whose logits `logits_of(begin, end)` makes a piece at a time.

    A width beyond the vocabulary is filled up with token 0 at -inf.
    """
    num = len(tokens)
    scores = _empty(num, width, -np.inf)
    for begin in range(0, num, PIECE_ROWS):
        end = min(begin + PIECE_ROWS, num)
        logits = logits_of(begin, end)
        chosen, ids, tops = kernels.score_tokens(logits, tokens[begin:end], min(width, logits.shape[1]))
        scores.chosen[begin:end] = chosen.cpu().numpy()
        scores.ids[begin:end, : ids.shape[1]] = ids.to(torch.int32).cpu().numpy()
        scores.tops[begin:end, : ids.shape[1]] = tops.cpu().numpy()
    return scores


def _empty(num: int, width: int, top: float) -> TokenScores:
    return TokenScores(
        np.zeros(num, np.float32), np.zeros((num, width), np.int32), np.full((num, width), top, np.float32)
    )
