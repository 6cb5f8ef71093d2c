"""Logprobs between a device's arrays and the bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.ipc.messages import Logprobs
from scheduler_proc.plan import TokenScores


def packed(scores: TokenScores) -> Logprobs:
    """As a message carries them."""
    return Logprobs(
        scores.ids.shape[1],
        scores.chosen.astype("<f4").tobytes(),
        scores.ids.astype("<i4").tobytes(),
        scores.tops.astype("<f4").tobytes(),
    )


def since(logprobs: Logprobs, num: int) -> Logprobs:
    """Without those of the first `num` tokens."""
    size, width = np.dtype(np.float32).itemsize, logprobs.width
    return Logprobs(
        width,
        logprobs.chosen[num * size :],
        logprobs.ids[num * width * size :],
        logprobs.tops[num * width * size :],
    )


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """Pieces of one request's as one."""
    return Logprobs(
        parts[0].width,
        b"".join(part.chosen for part in parts),
        b"".join(part.ids for part in parts),
        b"".join(part.tops for part in parts),
    )
