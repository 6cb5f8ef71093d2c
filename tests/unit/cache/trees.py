"""Short spellings for tests of the prefix tree: trees with a log of what they let go, keys and pages from ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from scheduler_proc.cache.events import EventBus
from scheduler_proc.cache.eviction import Policy
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.radix_tree import Inserted, Match, RadixTree

FULL = CacheGroup("full", "full")


def window(tokens: int) -> CacheGroup:
    return CacheGroup("window", "window", tokens)


def keys(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int64)


def pages(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


class Logged:
    """A tree, the pages it let go as (group, pages, busy_until), and a clock that tests set."""

    def __init__(
        self,
        groups: Sequence[CacheGroup] = (FULL,),
        page_size: int = 1,
        policy: Policy = "lru",
        bus: EventBus | None = None,
        max_pinned_pages: Sequence[int] | None = None,
    ) -> None:
        self.now = 0.0
        self.evicted: list[tuple[int, list[int], int]] = []
        self.tree = RadixTree(
            groups,
            page_size,
            policy=policy,
            on_evict=lambda group, ids, busy: self.evicted.append((group, ids.tolist(), busy)),
            clock=lambda: self.now,
            bus=bus,
            max_pinned_pages=max_pinned_pages,
        )

    def insert(self, tokens: Iterable[int], *ids: Iterable[int], name: bytes = b"", priority: int = 0) -> Inserted:
        got = self.tree.insert(name, keys(tokens), [pages(group) for group in ids], priority=priority)
        assert self.tree.check() == []
        return got

    def match(self, tokens: Iterable[int], limit: int = 1 << 30, name: bytes = b"") -> Match:
        got = self.tree.match(name, keys(tokens), limit)
        assert self.tree.check() == []
        return got

    def evict(self, group: int, num_pages: int) -> list[tuple[int, list[int], int]]:
        """What this eviction let go."""
        self.evicted.clear()
        freed = self.tree.evict(group, num_pages)
        assert self.tree.check() == []
        assert freed == sum(len(ids) for index, ids, _ in self.evicted if index == group)
        return list(self.evicted)
