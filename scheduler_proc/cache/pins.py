"""What may not be evicted: locks on paths of the tree, and pins, which are locks with an expiry."""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from engine.errors import InvalidRequestError
from scheduler_proc.cache.groups import PAGE_ID_BYTES, CacheGroup, Node

log = logging.getLogger(__name__)

MOST_PINS = 1000
"""Pins that may live at a time."""


class Lock:
    """A kept path: per group, the tokens from `starts[group]` to the end of `node`.

    Tokens, not nodes: later splits may put new nodes into the kept part or cut off what lies before it.
    """

    __slots__ = ("held", "node", "starts")

    def __init__(self, node: Node, starts: tuple[int, ...]) -> None:
        self.node = node
        self.starts = starts
        self.held = True


class PathLocks:
    """Counts locks per node and group; `released` hears of each node that lost its last lock in some group.

    Counts and starts of G groups are lists of 2 G: behind the locks of each group come those locks that are pins.
    """

    def __init__(self, groups: Sequence[CacheGroup], released: Callable[[Node], None]) -> None:
        self._reaches = [group.reach for group in groups]
        self._names = [*(group.name for group in groups), *(f"pinned {group.name}" for group in groups)]
        self._released = released
        self.live: set[Lock] = set()
        self._num_kept = [0] * len(self._names)

    def num_locked(self, group: int) -> int:
        """Pages of `group` that locks keep, each counted once."""
        return self._num_kept[group]

    def num_pinned(self, group: int) -> int:
        """Pages of `group` that pins keep, each counted once."""
        return self._num_kept[group + len(self._reaches)]

    def _pages(self, node: Node, index: int) -> int:
        """Pages that the node has of the group that the count at `index` is about."""
        return held_pages(node, index % len(self._reaches))

    def lock(self, node: Node, *, pins: bool = False) -> Lock:
        """Keep the path that ends with `node`; to be called before anything is evicted after the match."""
        assert node.parent is not None or node.end == 0, "prefix tree: locked a node that is no longer there"
        end = node.end
        starts = tuple([max(0, end - reach) for reach in self._reaches])
        lock = Lock(node, starts * 2 if pins else starts)
        self.live.add(lock)
        while (parent := node.parent) is not None:
            counts = node.locks
            if counts is None:
                counts = node.locks = [0] * len(self._names)
            for group, start in enumerate(lock.starts):
                if start >= node.end:
                    continue
                if counts[group] == 0:
                    self._num_kept[group] += self._pages(node, group)
                counts[group] += 1
                if start > parent.end:
                    self._count_start(node, (group, start), 1)
            node = parent
        return lock

    def unlock(self, lock: Lock, busy_until: int) -> None:
        """Give the path up; steps up to `busy_until` may still read it. Raises RuntimeError the second time."""
        if not lock.held:
            raise RuntimeError("prefix tree: a lock was released twice")
        lock.held = False
        self.live.remove(lock)
        node = lock.node
        while (parent := node.parent) is not None:
            counts = node.locks
            assert counts is not None, "prefix tree: a locked path has an unlocked node"
            if node.busy_until < busy_until:
                node.busy_until = busy_until
            freed = False
            for group, start in enumerate(lock.starts):
                if start >= node.end:
                    continue
                counts[group] -= 1
                if counts[group] == 0:
                    freed = True
                    self._num_kept[group] -= self._pages(node, group)
                if start > parent.end:
                    self._count_start(node, (group, start), -1)
            if freed:
                if not any(counts):
                    node.locks = None
                self._released(node)
            node = parent

    def _count_start(self, node: Node, key: tuple[int, int], change: int) -> None:
        starts = node.starts
        if starts is None:
            starts = node.starts = {}
        starts[key] = starts.get(key, 0) + change
        if starts[key] == 0:
            del starts[key]
            if not starts:
                node.starts = None

    def split(self, upper: Node, node: Node) -> None:
        """`upper` was cut off the front of `node`: it is locked by those locks that reach beyond the cut."""
        if node.locks is None:
            return
        upper.locks = list(node.locks)
        if node.starts is None:
            return
        above: dict[tuple[int, int], int] = {}
        below: dict[tuple[int, int], int] = {}
        for (group, start), count in node.starts.items():
            if start < upper.end:
                above[group, start] = count
                continue
            if start > upper.end:
                below[group, start] = count
            upper.locks[group] -= count
            if upper.locks[group] == 0:
                self._num_kept[group] -= self._pages(upper, group)
        upper.starts = above or None
        node.starts = below or None

    def adopted(self, node: Node, group: int) -> None:
        """A tombstone got pages; the locks that were on it hold them."""
        if node.locks is not None:
            for index in (group, group + len(self._reaches)):
                if node.locks[index] > 0:
                    self._num_kept[index] += held_pages(node, group)

    def _covered(self) -> Counter[tuple[int, int]]:
        """For (id of a node, index of a count): how many of the live locks are on it."""
        counts: Counter[tuple[int, int]] = Counter()
        for lock in self.live:
            node = lock.node
            while node.parent is not None:
                for group, start in enumerate(lock.starts):
                    if start < node.end:
                        counts[id(node), group] += 1
                node = node.parent
        return counts

    def check(self, nodes: Sequence[Node]) -> list[str]:
        """Recount everything from the live locks, given all nodes of the tree."""
        problems = []
        counts = self._covered()
        starts: Counter[tuple[int, int, int]] = Counter()
        for lock in self.live:
            node = lock.node
            if node.parent is None and node.end > 0:
                problems.append(f"a lock is on a removed node that ended at {node.end}")
            while node.parent is not None:
                for group, start in enumerate(lock.starts):
                    if node.parent.end < start < node.end:
                        starts[id(node), group, start] += 1
                node = node.parent
        num_kept = [0] * len(self._names)
        for node in nodes:
            for group, name in enumerate(self._names):
                counted = node.locks[group] if node.locks is not None else 0
                expected = counts.pop((id(node), group), 0)
                if counted != expected:
                    problems.append(f"node ending at {node.end}: {counted} locks of {name} counted, {expected} held")
                if expected:
                    num_kept[group] += self._pages(node, group)
            if node.locks is not None and not any(node.locks):
                problems.append(f"node ending at {node.end}: an empty list of locks")
            own = {} if node.starts is None else node.starts
            expected_starts = {key: starts.get((id(node), *key), 0) for key in own}
            if own != expected_starts:
                problems.append(f"node ending at {node.end}: window starts {own}, held {expected_starts}")
        if sum(starts.values()) != sum(sum(node.starts.values()) for node in nodes if node.starts is not None):
            problems.append("a lock's window start is missing at its node")
        if counts:
            problems.append(f"{len(counts)} locked nodes are not in the tree")
        if num_kept != self._num_kept:
            problems.append(f"locked pages {self._num_kept}, recounted {num_kept}")
        return problems


def held_pages(node: Node, group: int) -> int:
    """Number of pages of `group` that the node has; 0 for a tombstone."""
    pages = node.pages[group]
    return 0 if pages is None else len(pages) // PAGE_ID_BYTES


class Pins:
    """Locks by number with the time (seconds of `clock`) at which each ends."""

    def __init__(
        self,
        locks: PathLocks,
        clock: Callable[[], float],
        groups: Sequence[CacheGroup],
        max_pages: Sequence[int] | None,
    ) -> None:
        self._locks = locks
        self._clock = clock
        self._names = [group.name for group in groups]
        self._max_pages = max_pages
        self._live: dict[int, Lock] = {}
        self._ends: list[tuple[float, int]] = []
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, node: Node, ttl_s: float) -> int:
        """Pin the path to `node` for `ttl_s` seconds.

        Raises InvalidRequestError beyond the limit of any group, and where MOST_PINS live already.
        """
        if not ttl_s > 0:
            raise InvalidRequestError(f"a pin must last longer than 0 seconds; got {ttl_s}", param="ttl_s")
        if len(self._live) >= MOST_PINS:
            raise InvalidRequestError(
                f"there are {len(self._live)} pins, and no more than {MOST_PINS} may live at a time: end some, or wait "
                "until they run out",
                code="pin_limit_exceeded",
            )
        lock = self._locks.lock(node, pins=True)
        if self._max_pages is not None:
            for group, (name, most) in enumerate(zip(self._names, self._max_pages, strict=True)):
                num = self._locks.num_pinned(group)
                if num > most:
                    self._locks.unlock(lock, 0)
                    raise InvalidRequestError(
                        f"with this pin {num} pages of the {name} cache would be pinned; at most {most} may be",
                        code="pin_limit_exceeded",
                    )
        pin_id = next(self._ids)
        self._live[pin_id] = lock
        heapq.heappush(self._ends, (self._clock() + ttl_s, pin_id))
        return pin_id

    def remove(self, pin_id: int) -> bool:
        """End a pin early; False when there is none of this number."""
        lock = self._live.pop(pin_id, None)
        if lock is None:
            return False
        self._locks.unlock(lock, 0)
        # Numbers of removed pins wait in the heap for their end; not more of them than of live ones.
        if len(self._ends) > 2 * len(self._live) + 64:
            self._ends = [item for item in self._ends if item[1] in self._live]
            heapq.heapify(self._ends)
        return True

    def drop_oldest(self) -> bool:
        """End the pin that was made first; False when there is none."""
        if not self._live:
            return False
        pin_id = next(iter(self._live))
        log.warning("event=pin_dropped pin=%d reason=a request needs its pages", pin_id)
        return self.remove(pin_id)

    def drop_detached(self) -> None:
        """End the pins of what nobody can find any more."""
        for pin_id, lock in list(self._live.items()):
            if lock.node.detached:
                log.warning("event=pin_dropped pin=%d reason=its prefix is broken", pin_id)
                self.remove(pin_id)

    def expire(self) -> int:
        """End what is over; returns how many pins that were."""
        if not self._ends:
            return 0
        now = self._clock()
        num = 0
        while self._ends and self._ends[0][0] <= now:
            num += self.remove(heapq.heappop(self._ends)[1])
        return num

    def clear(self) -> None:
        for lock in self._live.values():
            self._locks.unlock(lock, 0)
        self._live.clear()
        self._ends.clear()

    def check(self) -> list[str]:
        """One line for each thing wrong."""
        problems = [f"pin {number} has lost its lock" for number, lock in self._live.items() if not lock.held]
        if not self._live.keys() <= {number for _, number in self._ends}:
            problems.append("a pin would never expire")
        return problems
