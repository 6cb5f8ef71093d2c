"""Which pages each slot uses, per cache group: the tree's at the front, the request's own tail behind them."""

from __future__ import annotations

import numpy as np

from scheduler_proc.plan import PageUpdates
from scheduler_proc.virtual_array import virtual_array


class PageTable:
    """One cache group's table, int32 [num_slots, max_pages], and the bounds of every slot's columns.

    Columns [first, shared) belong to the tree, [max(first, shared), num) to the slot; below `first` nothing is kept
    (a window has moved on). What the device has not heard of yet gathers until `take_updates`.
    """

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.pages = virtual_array((num_slots, max_pages), np.int32)
        self.first = np.zeros(num_slots, np.int32)
        self.shared = np.zeros(num_slots, np.int32)
        self.num = np.zeros(num_slots, np.int32)
        self.num_shares = 0
        """How often a slot's front has become the tree's, or other pages of it: grows only."""
        self._updates: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def append(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """The same number of pages more for each of `rows` (distinct slots, int32 [m]); pages: int32 [k * m]."""
        columns = self.num[rows]
        num = len(pages) // len(rows)
        if num == 1:
            self.pages[rows, columns] = pages
            self._updates.append((rows.astype(np.int32), columns, pages))
        else:
            columns = columns[:, None] + np.arange(num, dtype=np.int32)
            self.pages[rows[:, None], columns] = pages.reshape(-1, num)
            self._updates.append((np.repeat(rows, num).astype(np.int32), columns.reshape(-1), pages))
        self.num[rows] += np.int32(num)

    def extend(self, slot: int, pages: np.ndarray) -> None:
        """Several more pages for one slot."""
        if len(pages):
            start = int(self.num[slot])
            self.num[slot] = start + len(pages)
            self._set(slot, start, pages)

    def begin(self, slot: int, shared_pages: np.ndarray) -> None:
        """A new occupant that begins with the tree's pages; -1 marks what a window has left behind."""
        num = len(shared_pages)
        self.first[slot] = _after_last_missing(shared_pages)
        self.shared[slot] = self.num[slot] = num
        if num:
            self._set(slot, 0, np.maximum(shared_pages, 0))

    def share(self, slot: int, pages: np.ndarray) -> None:
        """The first len(pages) columns are the tree's now, with these page ids (-1: as before)."""
        num = len(pages)
        self.num_shares += 1
        old = self.pages[slot, :num]
        changed = np.flatnonzero((pages >= 0) & (pages != old))
        if len(changed):
            self.pages[slot, changed] = pages[changed]
            columns = changed.astype(np.int32)
            self._updates.append((np.full(len(columns), slot, np.int32), columns, pages[changed]))
        # What the tree does not keep here may be gone by the next time: it is behind the window for good.
        self.first[slot] = max(int(self.first[slot]), _after_last_missing(pages))
        self.shared[slot] = num

    def tail(self, slot: int) -> np.ndarray:
        """int32: the slot's own pages."""
        start = max(int(self.first[slot]), int(self.shared[slot]))
        return self.pages[slot, start : int(self.num[slot])]

    def prefix(self, slot: int, num: int) -> np.ndarray:
        """int32 [num]: the first columns, -1 where nothing is kept."""
        pages = self.pages[slot, :num].copy()
        pages[: int(self.first[slot])] = -1
        return pages

    def end(self, slot: int) -> np.ndarray:
        """The occupant leaves; returns a copy of its own pages."""
        tail = self.tail(slot).copy()
        self.first[slot] = self.shared[slot] = self.num[slot] = 0
        if self._updates:
            kept = [(s != slot, s, c, p) for s, c, p in self._updates]
            self._updates = [(s[keep], c[keep], p[keep]) for keep, s, c, p in kept if keep.any()]
        return tail

    def take_updates(self) -> PageUpdates | None:
        """What the device must hear; each entry once, the newest value of an entry named twice."""
        updates, self._updates = self._updates, []
        if not updates:
            return None
        if len(updates) == 1:
            return PageUpdates(*updates[0])
        slots, columns, pages = (np.concatenate(part) for part in zip(*updates, strict=True))
        entry = slots.astype(np.int64) * self.pages.shape[1] + columns
        _, newest = np.unique(entry[::-1], return_index=True)
        if len(newest) < len(entry):
            keep = len(entry) - 1 - newest
            slots, columns, pages = slots[keep], columns[keep], pages[keep]
        return PageUpdates(slots, columns, pages)

    def _set(self, slot: int, start: int, pages: np.ndarray) -> None:
        columns = np.arange(start, start + len(pages), dtype=np.int32)
        self.pages[slot, columns] = pages
        self._updates.append((np.full(len(pages), slot, np.int32), columns, pages.astype(np.int32)))


def _after_last_missing(pages: np.ndarray) -> int:
    """First column from which on every page (-1 = none) is there."""
    missing = np.flatnonzero(pages < 0)
    return int(missing[-1]) + 1 if len(missing) else 0
