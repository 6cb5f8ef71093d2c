"""What the prefix tree should do, said naively: a dictionary of pages, every question answered by looking at all.

A page is known by its namespace and all keys up to its end. A page that ends a node says so; nodes are never merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_proc.cache.events import as_numbers, page_hashes
from scheduler_proc.cache.groups import CacheGroup

Keys = tuple[int, ...]
Place = tuple[bytes, Keys]
Evicted = tuple[int, tuple[int, ...], int]


@dataclass
class Block:
    """One cached page of keys."""

    pages: list[int]
    created: int
    access: int
    priority: int
    ends_node: bool = False
    hits: int = 0
    busy_until: int = 0


@dataclass(eq=False)
class ModelLock:
    """A kept prefix; `starts` per group in tokens."""

    place: Place
    starts: list[int]


@dataclass
class TreeModel:
    """The same operations as RadixTree, on blocks."""

    groups: Sequence[CacheGroup]
    page_size: int
    policy: str
    blocks: dict[Place, Block] = field(default_factory=dict)
    locks: list[ModelLock] = field(default_factory=list)
    tick: int = 0

    def prefixes(self, namespace: bytes, keys: Keys) -> list[Place]:
        return [(namespace, keys[:end]) for end in range(self.page_size, len(keys) + 1, self.page_size)]

    def nodes(self) -> list[list[Place]]:
        """Each node's places, top first."""
        found = []
        for (namespace, keys), block in self.blocks.items():
            if block.ends_node:
                run: list[Place] = []
                for place in reversed(self.prefixes(namespace, keys)):
                    if run and self.blocks[place].ends_node:
                        break
                    run.insert(0, place)
                found.append(run)
        return found

    def windows(self) -> list[int]:
        return [index for index, group in enumerate(self.groups) if group.kind == "window"]

    def usable(self, namespace: bytes, keys: Keys, limit: int) -> Keys:
        """The longest prefix that is valid in every group."""
        best: Keys = ()
        for _, prefix in self.prefixes(namespace, keys[: max(0, limit)]):
            if (namespace, prefix) not in self.blocks:
                break
            good = True
            for index in self.windows():
                start = max(0, len(prefix) - self.groups[index].window)
                for token in range(start, len(prefix)):
                    place = (namespace, prefix[: (token // self.page_size + 1) * self.page_size])
                    good = good and self.blocks[place].pages[index] >= 0
            if good:
                best = prefix
        return best

    def shown(self, namespace: bytes, prefix: Keys) -> list[list[int]]:
        """Page ids per group, -1 for those wholly before the last window."""
        result = []
        for index, group in enumerate(self.groups):
            ids = [self.blocks[place].pages[index] for place in self.prefixes(namespace, prefix)]
            if group.kind == "window":
                start = max(0, len(prefix) - group.window)
                ids = [-1 if (i + 1) * self.page_size <= start else page for i, page in enumerate(ids)]
            result.append(ids)
        return result

    def match(self, namespace: bytes, keys: Keys, limit: int) -> Keys:
        prefix = self.usable(namespace, keys, limit)
        if prefix:
            self.blocks[namespace, prefix].ends_node = True
            self.tick += 1
            for place in self.prefixes(namespace, prefix):
                self.blocks[place].access = self.tick
                self.blocks[place].hits += 1
        return prefix

    def insert(
        self, namespace: bytes, keys: Keys, pages: Sequence[Sequence[int]], priority: int
    ) -> tuple[list[int], list[list[int]]]:
        """Number of new pages and the duplicates, per group."""
        places = self.prefixes(namespace, keys)
        num_known = sum(place in self.blocks for place in places)
        if num_known:
            self.blocks[places[num_known - 1]].ends_node = True
        self.tick += 1
        new = [0] * len(self.groups)
        for place in places[:num_known]:
            self.blocks[place].access = self.tick
            self.blocks[place].priority = max(self.blocks[place].priority, priority)
        for index in self.windows():
            for run in self.nodes():
                if run[0] not in places[:num_known] or self.blocks[run[0]].pages[index] >= 0:
                    continue
                given = [pages[index][places.index(place)] for place in run]
                for position, place in enumerate(run):
                    if position and (given[position] >= 0) != (given[position - 1] >= 0):
                        self.blocks[run[position - 1]].ends_node = True
                    self.blocks[place].pages[index] = given[position]
                    new[index] += given[position] >= 0
        for number in range(num_known, len(places)):
            own = [pages[index][number] for index in range(len(self.groups))]
            self.blocks[places[number]] = Block(own, self.tick, self.tick, priority)
            for index, page in enumerate(own):
                new[index] += page >= 0
                if number > num_known and (page >= 0) != (pages[index][number - 1] >= 0):
                    self.blocks[places[number - 1]].ends_node = True
        self.blocks[places[-1]].ends_node = True
        duplicates = [
            [
                page
                for place, page in zip(places, pages[index], strict=True)
                if page >= 0 and page != self.blocks[place].pages[index]
            ]
            for index in range(len(self.groups))
        ]
        return new, duplicates

    def lock(self, namespace: bytes, prefix: Keys) -> ModelLock:
        starts = [max(0, len(prefix) - group.window) if group.kind == "window" else 0 for group in self.groups]
        lock = ModelLock((namespace, prefix), starts)
        self.locks.append(lock)
        return lock

    def unlock(self, lock: ModelLock, busy_until: int) -> None:
        self.locks.remove(lock)
        for place in self.prefixes(*lock.place):
            self.blocks[place].busy_until = max(self.blocks[place].busy_until, busy_until)

    def is_locked(self, run: list[Place], index: int) -> bool:
        namespace, end = run[-1]
        return any(
            lock.place[0] == namespace and lock.place[1][: len(end)] == end and lock.starts[index] < len(end)
            for lock in self.locks
        )

    def num_pages(self, index: int) -> int:
        return sum(block.pages[index] >= 0 for block in self.blocks.values())

    def num_locked(self, index: int) -> int:
        return sum(
            len(run) for run in self.nodes() if self.blocks[run[0]].pages[index] >= 0 and self.is_locked(run, index)
        )

    def pages_of(self, locks: list[ModelLock]) -> list[int]:
        """Pages per group that these locks alone would keep."""
        alone = TreeModel(self.groups, self.page_size, self.policy, self.blocks, locks)
        return [alone.num_locked(index) for index in range(len(self.groups))]

    def rank(self, run: list[Place]) -> tuple[int, ...]:
        block = self.blocks[run[-1]]
        first = {
            "lru": (block.access,),
            "lfu": (block.hits, block.access),
            "fifo": (block.created,),
            "priority": (block.priority, block.access),
        }[self.policy]
        return (*first, len(run[-1][1]))

    def drop(self, run: list[Place]) -> list[Evicted]:
        blocks = [self.blocks.pop(place) for place in run]
        return [
            (index, tuple(block.pages[index] for block in blocks), blocks[0].busy_until)
            for index in range(len(self.groups))
            if blocks[0].pages[index] >= 0
        ]

    def hollow(self, run: list[Place], index: int) -> Evicted:
        blocks = [self.blocks[place] for place in run]
        evicted = (index, tuple(block.pages[index] for block in blocks), blocks[0].busy_until)
        for block in blocks:
            block.pages[index] = -1
        return evicted

    def evict(self, index: int, num_pages: int) -> list[Evicted]:
        evicted: list[Evicted] = []
        freed = 0
        while freed < num_pages:
            runs = [run for run in self.nodes() if not self.is_locked(run, index)]
            if self.groups[index].kind == "window":
                runs = [run for run in runs if self.blocks[run[0]].pages[index] >= 0]
            else:
                runs = [run for run in runs if self.is_leaf(run)]
            if not runs:
                break
            run = min(runs, key=self.rank)
            freed += len(run)
            evicted += [self.hollow(run, index)] if self.groups[index].kind == "window" else self.drop(run)
        return evicted

    def is_leaf(self, run: list[Place]) -> bool:
        namespace, end = run[-1]
        return not any(
            place[0] == namespace and len(place[1]) > len(end) and place[1][: len(end)] == end for place in self.blocks
        )

    def flush(self) -> list[Evicted]:
        """In no order."""
        evicted: list[Evicted] = []
        full = next(index for index, group in enumerate(self.groups) if group.kind == "full")
        for run in self.nodes():
            if not self.is_locked(run, full):
                evicted += self.drop(run)
                continue
            for index in self.windows():
                if self.blocks[run[0]].pages[index] >= 0 and not self.is_locked(run, index):
                    evicted.append(self.hollow(run, index))
        return evicted

    def stored(self) -> set[tuple[bytes, int, int]]:
        """(namespace, hash, group) of every cached page."""
        result = set()
        for (namespace, keys), block in self.blocks.items():
            data = b"".join(key.to_bytes(8, "little") for key in keys)
            name = as_numbers(page_hashes(namespace, b"", data, 8 * self.page_size))[-1]
            result.update((namespace, name, index) for index, page in enumerate(block.pages) if page >= 0)
        return result
