"""The pages of one cache group and who owns each: free list, a slot's tail, or in flight until a step is done."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np


class PagePool:
    """Page ids 0..num_pages-1. Freed pages are reused only after the steps that may touch them have been collected."""

    def __init__(self, num_pages: int, page_size: int, on_free: Callable[[np.ndarray], None]) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._in_flight: deque[tuple[int, np.ndarray]] = deque()
        self._num_in_flight = 0
        self._on_free = on_free

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def take(self, num: int) -> np.ndarray:
        """int32 [num] pages out of the free list; the caller has checked `num_free`."""
        assert num <= self._num_free, "page pool: taken more than free"
        self._num_free -= num
        return self._free[self._num_free : self._num_free + num].copy()

    def give_back(self, pages: np.ndarray, last_step: int | None) -> None:
        """Return pages; they stay in flight until step `last_step` is collected (None: nothing is running)."""
        if len(pages) == 0:
            return
        if last_step is None:
            self._put(pages)
        else:
            self._in_flight.append((last_step, pages.copy()))
            self._num_in_flight += len(pages)

    def step_done(self, step: int) -> None:
        """Step `step` and all before it are collected: what waited for them is free."""
        while self._in_flight and self._in_flight[0][0] <= step:
            _, pages = self._in_flight.popleft()
            self._num_in_flight -= len(pages)
            self._put(pages)

    def _put(self, pages: np.ndarray) -> None:
        self._on_free(pages)
        self._free[self._num_free : self._num_free + len(pages)] = pages
        self._num_free += len(pages)

    def reclaim(self, owned: np.ndarray) -> None:
        """Write the free list anew: all pages but those `owned` by others and those in flight."""
        busy = np.zeros(self.num_pages, bool)
        for pages in (owned, *(pages for _, pages in self._in_flight)):
            busy[pages] = True
        free = np.flatnonzero(~busy).astype(np.int32)
        self._num_free = len(free)
        self._free[: len(free)] = free

    def audit(self, tails: dict[str, np.ndarray]) -> list[str]:
        """Rebuild page -> owner from the free list, the steps in flight and `tails` (owner name -> its pages).

        Returns one line per page that has no owner or several; empty = every page has exactly one.
        """
        claims: dict[str, np.ndarray] = {"free": self._free[: self._num_free], **tails}
        for step, pages in self._in_flight:
            key = f"in flight until step {step}"
            claims[key] = np.concatenate([claims[key], pages]) if key in claims else pages
        counts = np.zeros(self.num_pages, dtype=np.int64)
        for pages in claims.values():
            np.add.at(counts, pages, 1)
        problems = []
        for page in np.flatnonzero(counts != 1):
            owners = [name for name, pages in claims.items() if page in pages]
            problems.append(f"page {page}: {', '.join(owners) if owners else 'no owner'}")
        return problems
