"""Steps of unchanged rows, kept as counts: what they did to each slot is written down when somebody looks.

While the same rows decode, every step adds one to each row's lengths. Doing that row by row costs more than all else in
a step of a thousand rows, so a run keeps the arrays it began with and how many steps went by.
"""

from __future__ import annotations

import numpy as np

BLOCK_STEPS = 64
"""Collected steps whose tokens wait to be written into the slots' token table together."""
PADDING = 16
"""Unused columns of a block: rows a power of two apart would fall into the same lines of the processor's cache."""


class PlannedRun:
    """Planned steps of the rows at `index`, which had `planned` tokens (int32 [n]) when the run began."""

    def __init__(self, index: np.ndarray | slice, planned: np.ndarray) -> None:
        self.index = index
        self.start = planned
        self.num_steps = 0
        self.last_step = 0

    def lens(self) -> np.ndarray:
        """int32 [n]: planned tokens of each row now; the caller's own."""
        return self.start + np.int32(self.num_steps)


class CollectedRun:
    """Collected steps of the rows at `index`, which had `known` tokens (int32 [n]) when the run began."""

    def __init__(self, index: np.ndarray | slice, known: np.ndarray, full_len: np.ndarray) -> None:
        self.index = index
        self.start = known
        self.num_steps = 0
        self.num_until_end = int((full_len - known).min())
        """Steps until the first row's answer is full."""
        self._num_rows = len(known)
        self._block = np.empty((min(BLOCK_STEPS, max(self.num_until_end, 1)), len(known) + PADDING), np.int32)

    @property
    def is_full(self) -> bool:
        return self.num_steps == len(self._block)

    def add(self, tokens: np.ndarray) -> None:
        """One more step: int32 [n]."""
        self._block[self.num_steps, : self._num_rows] = tokens
        self.num_steps += 1

    def tokens(self) -> np.ndarray:
        """int32 [n, num_steps]"""
        return np.ascontiguousarray(self._block[: self.num_steps, : self._num_rows].T)
