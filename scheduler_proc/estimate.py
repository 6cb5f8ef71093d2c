"""How much of its allowed answer a request is expected to use: what admission keeps room for."""

from __future__ import annotations

import numpy as np

LONGEST = 4096
"""Answers are not expected to grow beyond this, however many tokens a request allows."""
START = 0.7
LEAST = 0.1
WEIGHT = 0.1
"""Weight of one finished request in the moving average."""
AHEAD = 16
"""Every running request is given at least this many tokens of room."""


class OutputEstimate:
    """An adaptive ratio: it follows what finished requests used and jumps up when memory ran out."""

    def __init__(self, conservativeness: float = 1.0) -> None:
        self.conservativeness = conservativeness
        self.ratio = START

    def remaining(self, allowed: np.ndarray, produced: np.ndarray) -> np.ndarray:
        """Tokens that requests will still add: int64 like the arguments (tokens allowed, tokens produced)."""
        ratio = min(1.0, self.ratio * self.conservativeness)
        expected = np.ceil(np.minimum(allowed, LONGEST) * ratio).astype(np.int64) - produced
        return np.minimum(np.maximum(expected, AHEAD), allowed - produced)

    def finished(self, allowed: int, produced: int) -> None:
        """A request has ended by itself."""
        used = min(1.0, produced / min(allowed, LONGEST))
        self.ratio = max(LEAST, self.ratio + WEIGHT * (used - self.ratio))

    def ran_out(self) -> None:
        """Memory ran out: the estimate was too low."""
        self.ratio = min(1.0, self.ratio * 1.25)
