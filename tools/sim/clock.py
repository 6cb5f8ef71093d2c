"""The virtual clock: seconds that pass only when the simulated device works or nobody is there."""

from __future__ import annotations


class Clock:
    """Seconds since the simulation began. Goes forward only."""

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; a moment that has passed already changes nothing."""
        self._now_s = max(self._now_s, time_s)

    def spend(self, duration_s: float) -> None:
        """Let `duration_s` >= 0 pass."""
        assert duration_s >= 0, "clock: time runs forward"
        self._now_s += duration_s
