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
"""Share of the time that steps may cost which only find out whether other numbers of drafts would pay now."""
_FIRST_PROBES = 2
"""Steps of each number of drafts before their time is believed: the first one may still prepare something."""
_LEAST_PERIOD, _MOST_PERIOD = 16, 10_000
"""Steps between two probes of a number of drafts at least, and at most."""
_DOUBT = 1.02
"""Drafting must be expected to be so much faster than not drafting."""
_UNKNOWN_COST = 1.2
"""What a number of drafts that was never tried is believed to take, against the next smaller one."""

MOST_CUDA_ROWS = 64
"""Steps of more rows draft nothing on a CUDA device, and have no graphs that verify: where more rows decode, verifying
takes as much longer as it gives, and much memory."""


def draft_sizes(most: int) -> tuple[int, ...]:
    """Numbers of drafts that steps may have: 1, 2, 4 and so on, and `most`."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*sizes, most) if most else ()


@dataclass
class _Times:
    """What steps of about so many rows take, by their number of drafts."""

    seconds: dict[int, float] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    chosen: dict[int, int] = field(default_factory=dict)
    """The step that had a number of drafts last, counted over this class of rows."""
    num_steps: int = 0

    def add(self, num_drafts: int, seconds: float) -> None:
        count = self.counts[num_drafts] = self.counts.get(num_drafts, 0) + 1
        old = self.seconds.get(num_drafts)
        if old is None or count <= _FIRST_PROBES:
            self.seconds[num_drafts] = seconds if old is None else min(old, seconds)
            return
        # One step that something else held up says little; one that came long after the last says more.
        share = 0.5 if self.is_seldom(num_drafts) else 1 - _KEEPS
        self.seconds[num_drafts] = (1 - share) * old + share * min(seconds, 2 * old)

    def is_seldom(self, num_drafts: int) -> bool:
        return self.num_steps > 10 * self.counts.get(num_drafts, 0)

    def age(self, num_drafts: int) -> int:
        """Steps since."""
        return self.num_steps - self.chosen.get(num_drafts, 0)

    def guess(self, sizes: list[int]) -> dict[int, float]:
        """Seconds of steps without drafts and with so many."""
        found, last = {}, self.seconds[0]
        for size in (0, *sizes):
            last = self.seconds.get(size, last * _UNKNOWN_COST)
            found[size] = last
        return found


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
        chosen = self._choice(times, sizes)
        times.chosen[chosen] = times.num_steps
        times.num_steps += 1
        return chosen

    def _choice(self, times: _Times, sizes: list[int]) -> int:
        if times.counts.get(0, 0) < _FIRST_PROBES:
            return 0
        seconds = times.guess(sizes)
        gained = 1.0 + np.concatenate((np.zeros(1), self._chances.cumprod().cumsum()))
        rates = {size: float(gained[size]) / taken for size, taken in seconds.items()}
        known = [size for size in (0, *sizes) if times.counts.get(size, 0) >= _FIRST_PROBES]
        best = max(known, key=rates.__getitem__)
        if rates[best] < _DOUBT * rates[0]:
            best = 0
        # Times and chances change: the others are tried again, the more seldom the more that costs.
        for size in (0, *sizes):
            if size == best:
                continue
            lost = max(seconds[size] * (1.0 - rates[size] / rates[best]), 0.0) / seconds[best]
            period = min(max(lost * len(sizes) / _PROBE_LOSS, _LEAST_PERIOD), _MOST_PERIOD)
            if size not in known and rates[size] >= _DOUBT * rates[best]:
                period = 1
            if times.age(size) >= period:
                return size
        return best

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
