"""Logprobs of a step: of the tokens it drew, and of prompt tokens in its chunks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from scheduler_proc.plan import StepPlan, TokenScores

PIECE_ROWS = 32
"""Rows whose logprobs are worked out at a time on a CPU: each takes a few vectors as wide as the vocabulary."""
DEVICE_PIECE_ROWS = 256
"""The same on other devices, where small pieces would leave most of them idle."""


def scored_rows(plan: StepPlan) -> np.ndarray:
    """intp: which of the plan's sampling rows want logprobs, counted among those that sample."""
    assert plan.logprobs is not None
    return np.flatnonzero(plan.logprobs[plan.sample] >= 0)


def spread(found: TokenScores, places: np.ndarray, num: int) -> TokenScores:
    """Scores of m tokens put where they are (int [m]) among `num`; zeros elsewhere."""
    width = found.ids.shape[1]
    scores = TokenScores(
        np.zeros(num, np.float32), np.zeros((num, width), np.int32), np.zeros((num, width), np.float32)
    )
    scores.chosen[places] = found.chosen
    scores.ids[places] = found.ids
    scores.tops[places] = found.tops
    return scores


def score_in_pieces(
    kernels: KernelSet, logits_of: Callable[[int, int], Tensor], tokens: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of `tokens` (int64 [m], m > 0), whose logits `logits_of(begin, end)` makes a piece at a time.

    Returns what `kernels.logprobs.score_tokens` does, of all pieces; no more alternatives than the vocabulary has.
    """
    num = len(tokens)
    at_once = PIECE_ROWS if tokens.device.type == "cpu" else DEVICE_PIECE_ROWS
    found = []
    for begin in range(0, num, at_once):
        end = min(begin + at_once, num)
        logits = logits_of(begin, end)
        found.append(kernels.score_tokens(logits, tokens[begin:end], min(width, logits.shape[1])))
    if len(found) == 1:
        return found[0]
    chosen, ids, tops = (torch.cat(parts) for parts in zip(*found, strict=True))
    return chosen, ids, tops
