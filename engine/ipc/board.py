"""The heartbeat board: one small file in the run directory that every process writes its own line of.

Health reads it without asking anybody: a process that hangs cannot answer, but its line grows old.
"""

from __future__ import annotations

import mmap
import os
import time
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np


class State(IntEnum):
    """What a process says of itself."""

    STARTING = 0
    READY = 1
    STOPPED = 2
    GIVEN_UP = 3
    """Died too often: it is not started again."""


class Line(NamedTuple):
    """One process's line. `time_ns` is CLOCK_MONOTONIC; `work` counts the requests at work there."""

    pid: int
    state: State
    time_ns: int
    step: int
    work: int

    @property
    def age_s(self) -> float:
        """Seconds since it was written."""
        return (time.monotonic_ns() - self.time_ns) / 1e9


_NUM_CELLS = len(Line._fields)


class Board:
    """Lines of all processes, uint64 [num_lines, cells of Line]; line i is written by process i while it lives."""

    def __init__(self, path: Path, num_lines: int, *, create: bool = False) -> None:
        size = num_lines * _NUM_CELLS * 8
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = os.open(path, flags, 0o600)
        try:
            if create:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self.cells = np.frombuffer(self._map, dtype=np.uint64).reshape(num_lines, _NUM_CELLS)

    def read(self, index: int) -> Line:
        """Line `index` as it stands."""
        pid, state, time_ns, step, work = self.cells[index].tolist()
        return Line(pid, State(state), time_ns, step, work)

    def mark(self, index: int, state: State) -> None:
        """Correct the line of a process that died and can no longer write it."""
        self.cells[index, 1] = state


class Heartbeat:
    """One process's own line."""

    def __init__(self, board: Board, index: int) -> None:
        self._cells = board.cells[index]
        self._cells[0] = os.getpid()
        self.beat(0, 0)

    def state(self, state: State) -> None:
        self._cells[1] = state
        self._cells[2] = time.monotonic_ns()

    def touch(self) -> None:
        """Record a sign of life amid one piece of work."""
        self._cells[2] = time.monotonic_ns()

    def beat(self, step: int, work: int) -> None:
        """Record a sign of life: the step number and how many requests are at work here."""
        self._cells[2:] = (time.monotonic_ns(), step, work)
