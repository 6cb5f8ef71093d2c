"""How many tokens to draft for the rows of a step: as many as pay, by what was accepted and what steps have taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

_KEEPS = 0.95
"""How much of an average stays when a new value comes."""
_DRIFT = 0.1
"""How fast what was believed of deeper drafts gives way to what is seen of shallower ones."""
_PROBE_LOSS = 0.01
"""Share of the time that steps may cost which only find out whether drafting would pay now."""
_FIRST_PROBES = 2
"""Steps of each number of drafts before their time is believed: the first one may still prepare something."""
_LEAST_PERIOD = 8
"""Steps between two probes at least, and at most."""
_MOST_PERIOD = 1000
_DOUBT = 1.02
"""Drafting must be expected to be so much faster than not drafting."""


def draft_sizes(most: int) -> tuple[int, ...]:
    """Numbers of drafts that steps may have: 1, 2, 4 and so on, and `most`."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*sizes, most) if most else ()


@dataclass
class _Times:
    """What steps of about so many rows take, by their number of drafts."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    until_probe: int = 0

    def add(self, num_drafts: int, seconds: float) -> None:
        count = self.counts[num_drafts] = self.counts.get(num_drafts, 0) + 1
        old = self.seconds.get(num_drafts)
        if old is None or count <= _FIRST_PROBES:
            self.seconds[num_drafts] = seconds if old is None else min(old, seconds)
            return
        # One step that something else held up says little.
        self.seconds[num_drafts] = _KEEPS * old + (1 - _KEEPS) * min(seconds, 2 * old)


class DraftBudget:
    """Chooses each step's number of drafts. The clock's time stands still within a turn of the loop, so that what was
    recorded comes out again."""

    def __init__(self, most: int, clock: Callable[[], float], *, is_fixed: bool = False) -> None:
        """most: drafts of a row at most; is_fixed: always as many."""
        self.sizes = draft_sizes(most)
        self._most = most
        self._clock = clock
        self._is_fixed = is_fixed
        self._chances = np.full(most, 0.5)
        """How likely the i-th draft of a row is accepted, where all before it are."""
        self._times: dict[int, _Times] = {}
        self._began: float | None = None
        """When this turn began; None: its time says nothing."""
        self._ended: tuple[int, int] | None = None
        """Rows and drafts of the step that was collected in it."""

    def choose(self, num_rows: int, limit: int) -> int:
        """Drafts for each row of the next step, in which so many rows decode: at most `limit`; 0: none."""
        if self._is_fixed:
            return min(self._most, limit)
        sizes = [size for size in self.sizes if size <= limit]
        if not sizes:
            return 0
        times = self._times.setdefault(_class(num_rows), _Times())
        if times.counts.get(0, 0) < _FIRST_PROBES:
            return 0
        best, most_gain = 0, 0.0
        for size in sizes:
            if times.counts.get(size, 0) < _FIRST_PROBES:
                # More drafts are tried when fewer pay already, or now and then.
                if most_gain >= _DOUBT or best == 0:
                    return self._probe(times, size) if times.counts.get(size, 0) else size
                break
            gain = self._gain(times, size)
            if gain > most_gain:
                best, most_gain = size, gain
        if most_gain >= _DOUBT:
            times.until_probe = 0
            return best
        return self._probe(times, best)

    def _probe(self, times: _Times, size: int) -> int:
        """`size` now and then, so that what it costs is a small share of the time; else no drafts."""
        times.until_probe -= 1
        if times.until_probe >= 0:
            return 0
        loss = max(times.seconds[size] / times.seconds[0] - 1.0, 0.0)
        times.until_probe = min(max(int(loss / _PROBE_LOSS), _LEAST_PERIOD), _MOST_PERIOD)
        return size

    def _gain(self, times: _Times, size: int) -> float:
        """How much faster than without drafts."""
        return (1.0 + float(self._chances[:size].cumprod().sum())) * times.seconds[0] / times.seconds[size]

    def begin_turn(self) -> None:
        """A turn of the loop begins: the one before took what its step took, if it collected one and no more."""
        now, began, ended = self._clock(), self._began, self._ended
        self._began, self._ended = now, None
        if began is not None and ended is not None and now > began:
            num_rows, num_drafts = ended
            self._times.setdefault(_class(num_rows), _Times()).add(num_drafts, now - began)

    def collected(
        self, num_rows: int, num_drafts: int, counts: np.ndarray | None = None, drafted: np.ndarray | None = None
    ) -> None:
        """A step of rows that all decode was collected in this turn; counts, drafted: of its result."""
        if self._ended is not None:
            self._began = None  # Two in one turn.
        self._ended = (num_rows, num_drafts) if self._began is not None else None
        if counts is None or drafted is None or not num_drafts:
            return
        # Rows without a draft count as rejections, for they cost as much.
        num_reached = int((counts > 0).sum())
        for depth in range(num_drafts):
            if num_reached == 0:
                break
            num_accepted = int((counts > depth + 1).sum())
            share = 1.0 - _KEEPS**num_reached
            self._chances[depth] += share * (num_accepted / num_reached - self._chances[depth])
            num_reached = num_accepted
        # Of what was not drafted nothing is known but what came before it.
        deeper = self._chances[num_drafts:]
        deeper += _DRIFT * (self._chances[num_drafts - 1] - deeper)

    def forget_turn(self) -> None:
        """What this turn takes says nothing: its step was of another kind, or the loop waits after it."""
        self._began = self._ended = None


def _class(num_rows: int) -> int:
    """Numbers of rows whose steps take about the same."""
    return 1 << (num_rows - 1).bit_length()
