"""Logprobs between a device's arrays and the bytes of a message."""

from __future__ import annotations

from collections.abc import Sequence

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


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    """Those of several tokens of one request in one piece."""
    return Logprobs(
        parts[0].width,
        b"".join(part.chosen for part in parts),
        b"".join(part.ids for part in parts),
        b"".join(part.tops for part in parts),
    )
