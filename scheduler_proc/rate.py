"""How often something happens, lately."""

from __future__ import annotations

import math
import time
from collections import deque

WINDOW_S = 60.0
MOST_S = 600
"""Longest wait that is ever suggested, in seconds."""


class Rate:
    """Counts events over the last minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=4096)

    def count(self) -> None:
        self._times.append(time.monotonic())

    def seconds_for(self, num: int) -> int:
        """Whole seconds in which `num` events are to be expected, 1..MOST_S; 1 while nothing is known."""
        now = time.monotonic()
        while self._times and now - self._times[0] > WINDOW_S:
            self._times.popleft()
        if len(self._times) < 2:
            return 1
        per_second = len(self._times) / max(now - self._times[0], 1e-3)
        return min(MOST_S, max(1, math.ceil(num / per_second)))
