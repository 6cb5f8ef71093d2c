"""Random lives of a tree against the naive model: matches, pages, counts, order of eviction and events, exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.errors import InvalidRequestError
from scheduler_proc.cache.events import AllBlocksCleared, BlockStored, Event, EventBus
from scheduler_proc.cache.eviction import Policy
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.pins import Lock
from scheduler_proc.cache.radix_tree import Match, RadixTree
from tests.unit.cache.tree_model import Evicted, Keys, ModelLock, TreeModel

FULL = CacheGroup("full", "full")
GROUPS: list[list[CacheGroup]] = [
    [FULL],
    [FULL, CacheGroup("window", "window", 3)],
    [FULL, CacheGroup("window", "window", 5)],
    [CacheGroup("one", "window", 1), FULL, CacheGroup("wide", "window", 6)],
]
NAMESPACES = [b"", b"other"]
POLICIES: list[Policy] = ["lru", "lfu", "fifo", "priority"]
# Pages that differ in their first, a middle and their last key.
PAGES_OF_KEYS = {1: [(0,), (1,), (2,)], 4: [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0), (1, 0, 0, 0)]}
MAX_PINNED = 9

MAX_PAGES = 8

# Mostly the same first page, so that prefixes meet.
choices = st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), max_size=MAX_PAGES)
namespaces = st.sampled_from(NAMESPACES)


class TreeLife(RuleBasedStateMachine):
    @initialize(
        groups=st.sampled_from(GROUPS),
        page_size=st.sampled_from([1, 4]),
        policy=st.sampled_from(POLICIES),
        listens=st.booleans(),
    )
    def start(self, groups: list[CacheGroup], page_size: int, policy: Policy, listens: bool) -> None:
        self.now = 0.0
        self.evicted: list[Evicted] = []
        self.heard: set[tuple[bytes, int, int]] = set()
        self.listens = listens
        bus = EventBus()
        if listens:
            bus.subscribe(self.hear)
        self.groups = groups
        self.page_size = page_size
        self.tree = RadixTree(
            groups,
            page_size,
            policy=policy,
            on_evict=lambda group, pages, busy: self.evicted.append((group, tuple(pages.tolist()), busy)),
            clock=lambda: self.now,
            bus=bus,
            max_pinned_pages=[MAX_PINNED] * len(groups),
        )
        self.model = TreeModel(groups, page_size, policy)
        self.next_page = 0
        self.owned: list[set[int]] = [set() for _ in groups]
        self.locks: list[tuple[Lock, ModelLock]] = []
        self.pins: dict[int, tuple[ModelLock, float]] = {}
        self.step = 0

    def hear(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.heard.clear()
            return
        blocks = {(event.namespace, block, event.group) for block in event.block_hashes}
        if isinstance(event, BlockStored):
            assert not blocks & self.heard
            assert len(event.keys) == len(event.block_hashes) * event.page_size
            self.heard |= blocks
        else:
            assert blocks <= self.heard
            self.heard -= blocks

    def keys_of(self, choice: Sequence[int]) -> Keys:
        kinds = PAGES_OF_KEYS[self.page_size]
        return tuple(key for number in choice for key in kinds[number % len(kinds)])

    def fresh(self) -> int:
        self.next_page += 1
        return self.next_page

    def settle(self, expected: list[Evicted], *, ordered: bool = True) -> None:
        """What the tree let go is what the model expects; those pages are nobody's now."""
        got, self.evicted = self.evicted, []
        if ordered:
            assert got == expected
        else:
            assert sorted(got) == sorted(expected)
        for group, pages, _ in got:
            self.owned[group] -= set(pages)

    def matched(self, namespace: bytes, keys: Keys, limit: int) -> tuple[Match, Keys]:
        got = self.tree.match(namespace, np.array(keys, np.int64), limit)
        prefix = self.model.match(namespace, keys, limit)
        assert got.num_tokens == len(prefix) == got.node.end
        assert [pages.tolist() for pages in got.pages] == self.model.shown(namespace, prefix)
        return got, prefix

    def inserted(
        self, namespace: bytes, keys: Keys, pages: list[list[int]], priority: int = 0, keep: bool = False
    ) -> None:
        if not keys:
            return
        arrays = [np.array(ids, np.int32) for ids in pages]
        got = self.tree.insert(namespace, np.array(keys, np.int64), arrays, priority=priority)
        for array in arrays:
            array.fill(-7)  # the caller's memory is not the tree's
        new, duplicates = self.model.insert(namespace, keys, pages, priority)
        assert list(got.num_new_pages) == new
        assert [ids.tolist() for ids in got.duplicates] == duplicates
        assert got.node.end == len(keys)
        assert [ids.tolist() for ids in got.pages] == self.model.shown(namespace, keys)
        for index, ids in enumerate(pages):
            self.owned[index] |= {page for page in ids if page >= 0} - set(duplicates[index])
        if keep:
            self.locks.append((self.tree.lock(got.node), self.model.lock(namespace, keys)))

    @rule(
        namespace=namespaces,
        choice=choices,
        matches_first=st.booleans(),
        holes=st.lists(st.booleans(), min_size=MAX_PAGES, max_size=MAX_PAGES),
        realistic=st.booleans(),
        priority=st.integers(-1, 2),
        keep=st.booleans(),
    )
    def insert(
        self,
        namespace: bytes,
        choice: list[int],
        matches_first: bool,
        holes: list[bool],
        realistic: bool,
        priority: int,
        keep: bool,
    ) -> None:
        keys = self.keys_of(choice)
        pages = [[self.fresh() for _ in choice] for _ in self.groups]
        num_shared = 0
        if matches_first:
            got, prefix = self.matched(namespace, keys, len(keys))
            num_shared = len(prefix) // self.page_size
            for ids, shared in zip(pages, got.pages, strict=True):
                ids[:num_shared] = shared.tolist()
        for ids, group in zip(pages, self.groups, strict=True):
            if group.kind == "window":
                behind = max(0, len(keys) - group.window) // self.page_size
                for number in range(num_shared, len(ids)):
                    if number < behind if realistic else holes[number]:
                        ids[number] = -1
        self.inserted(namespace, keys, pages, priority, keep)

    def cached(self, pick: int) -> tuple[bytes, Keys]:
        """One of the prefixes in the tree."""
        places = sorted(self.model.blocks)
        return places[pick % len(places)] if places else (b"", ())

    @rule(pick=st.integers(0, 99), first=choices, second=choices)
    def fork(self, pick: int, first: list[int], second: list[int]) -> None:
        """Two continuations of something that is cached."""
        namespace, prefix = self.cached(pick)
        for choice in (first, second):
            keys = prefix + self.keys_of(choice)
            pages = [[self.fresh() for _ in range(len(keys) // self.page_size)] for _ in self.groups]
            self.inserted(namespace, keys, pages)

    @rule(namespace=namespaces, choice=choices, rest=st.integers(0, 3), limit=st.integers(-1, 33), keep=st.booleans())
    def match(self, namespace: bytes, choice: list[int], rest: int, limit: int, keep: bool) -> None:
        got, prefix = self.matched(namespace, self.keys_of(choice) + (0,) * rest, limit)
        if keep:
            self.locks.append((self.tree.lock(got.node), self.model.lock(namespace, prefix)))

    @rule(pick=st.integers(0, 99))
    def hold(self, pick: int) -> None:
        namespace, keys = self.cached(pick)
        got, prefix = self.matched(namespace, keys, len(keys))
        self.locks.append((self.tree.lock(got.node), self.model.lock(namespace, prefix)))

    @rule(pick=st.integers(0, 99), holes=st.lists(st.booleans(), min_size=MAX_PAGES, max_size=MAX_PAGES))
    def hollow_and_adopt(self, pick: int, holes: list[bool]) -> None:
        """What a window group lost comes back, in part."""
        namespace, keys = self.cached(pick)
        for index in self.model.windows():
            self.evict(index, self.tree.evictable(index) // 2)
        pages = [[self.fresh() for _ in range(len(keys) // self.page_size)] for _ in self.groups]
        for index in self.model.windows():
            pages[index] = [-1 if holes[number % MAX_PAGES] else page for number, page in enumerate(pages[index])]
        self.inserted(namespace, keys, pages)

    @precondition(lambda self: self.locks)
    @rule(pick=st.integers(0, 99), ahead=st.integers(0, 3))
    def unlock(self, pick: int, ahead: int) -> None:
        self.step += 1
        lock, expected = self.locks.pop(pick % len(self.locks))
        self.tree.unlock(lock, self.step + ahead)
        self.model.unlock(expected, self.step + ahead)
        with pytest.raises(RuntimeError):
            self.tree.unlock(lock)

    @rule(group=st.integers(0, 2), num_pages=st.integers(0, 6))
    def evict(self, group: int, num_pages: int) -> None:
        group %= len(self.groups)
        most = self.tree.evictable(group)
        freed = self.tree.evict(group, num_pages)
        expected = self.model.evict(group, num_pages)
        assert freed == sum(len(pages) for index, pages, _ in expected if index == group)
        assert min(num_pages, most) <= freed <= most
        self.settle(expected)

    @rule(pick=st.integers(0, 99), more=choices, ttl_s=st.integers(1, 5))
    def pin(self, pick: int, more: list[int], ttl_s: int) -> None:
        namespace, prefix = self.cached(pick)
        keys = prefix + self.keys_of(more)
        prefix = self.model.match(namespace, keys, len(keys))
        lock = self.model.lock(namespace, prefix)
        wanted = self.model.pages_of([lock, *(pinned for pinned, _ in self.pins.values())])
        try:
            pin_id, kept = self.tree.pin(namespace, np.array(keys, np.int64), ttl_s)
        except InvalidRequestError:
            assert max(wanted) > MAX_PINNED
            self.model.unlock(lock, 0)
            return
        assert kept == len(prefix)
        if prefix:
            assert max(wanted) <= MAX_PINNED
            self.pins[pin_id] = (lock, self.now + ttl_s)
        else:
            assert pin_id == 0
            self.model.unlock(lock, 0)

    @rule(pin_id=st.integers(0, 12))
    def unpin(self, pin_id: int) -> None:
        assert self.tree.unpin(pin_id) == (pin_id in self.pins)
        if pin_id in self.pins:
            self.model.unlock(self.pins.pop(pin_id)[0], 0)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        over = [pin_id for pin_id, (_, end) in self.pins.items() if end <= self.now]
        assert self.tree.expire_pins() == len(over)
        for pin_id in over:
            self.model.unlock(self.pins.pop(pin_id)[0], 0)

    @rule(really=st.integers(0, 19))
    def flush(self, really: int) -> None:
        if really != 7:  # seldom, or the tree never grows
            return
        for lock, _ in self.pins.values():
            self.model.unlock(lock, 0)
        self.pins.clear()
        freed = self.tree.flush()
        expected = self.model.flush()
        assert freed == sum(len(pages) for index, pages, _ in expected if index == 0)
        self.settle(expected, ordered=False)

    @invariant()
    def sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        assert self.tree.check() == []
        assert self.evicted == []
        assert self.tree.num_nodes == len(self.model.nodes())
        assert self.tree.num_pins == len(self.pins)
        assert self.tree.num_live_locks == len(self.locks) + len(self.pins)
        for index in range(len(self.groups)):
            num_pages, num_locked = self.model.num_pages(index), self.model.num_locked(index)
            assert self.tree.num_pages(index) == num_pages
            assert self.tree.num_locked(index) == num_locked
            assert self.tree.evictable(index) == num_pages - num_locked
            pages = self.tree.owned_pages(index).tolist()
            assert len(pages) == num_pages
            assert set(pages) == self.owned[index]
        if self.listens:
            assert self.heard == self.model.stored()

    def teardown(self) -> None:
        """Whatever happened: with nothing held, everything can go."""
        if not hasattr(self, "tree"):
            return
        while self.locks:
            self.unlock(0, 0)
        self.tree.flush()
        assert [self.tree.num_pages(index) for index in range(len(self.groups))] == [0] * len(self.groups)
        assert self.tree.num_nodes == 0
        assert self.tree.check() == []
        assert self.heard == set()


def live(num_lives: int, num_steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        TreeLife,
        settings=settings(
            max_examples=num_lives,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
        ),
    )


def live_long(seed: int, groups: list[CacheGroup], page_size: int, policy: Policy, num_steps: int) -> None:
    """One life of plain random steps: the trees grow larger than those that a search for small failures makes."""
    rng = random.Random(seed)
    life = TreeLife()
    life.start(groups, page_size, policy, listens=seed % 2 == 0)

    def choice() -> list[int]:
        return rng.choices([0, 0, 0, 1, 2, 3], k=rng.randint(0, MAX_PAGES))

    def holes() -> list[bool]:
        return rng.choices([False, True], k=MAX_PAGES)

    def pick() -> int:
        return rng.randrange(1000)

    def name() -> bytes:
        return rng.choice(NAMESPACES)

    steps: list[tuple[int, Callable[[], None]]] = [
        (
            6,
            lambda: life.insert(
                name(),
                choice(),
                rng.random() < 0.5,
                holes(),
                rng.random() < 0.5,
                rng.randint(-1, 2),
                rng.random() < 0.3,
            ),
        ),
        (2, lambda: life.fork(pick(), choice(), choice())),
        (3, lambda: life.match(name(), choice(), rng.randint(0, 3), rng.randint(-1, 33), False)),
        (5, lambda: life.hold(pick())),
        (6, lambda: life.unlock(pick(), rng.randint(0, 3)) if life.locks else None),
        (4, lambda: life.evict(rng.randrange(3), rng.randint(0, 4))),
        (2, lambda: life.hollow_and_adopt(pick(), holes())),
        (1, lambda: life.pin(pick(), choice(), rng.randint(1, 5))),
        (1, lambda: life.unpin(rng.randint(0, 12))),
        (1, lambda: life.time_passes(rng.randint(0, 3))),
        (1, lambda: life.flush(rng.randrange(20))),
    ]
    weights = [weight for weight, _ in steps]
    for _ in range(num_steps):
        rng.choices(steps, weights)[0][1]()
        life.sound()
    life.teardown()


COMBINATIONS = [(groups, size, policy) for groups in GROUPS for size in PAGES_OF_KEYS for policy in POLICIES]


def test_searched_lives() -> None:
    live(60, 30, derandomize=True)


@pytest.mark.parametrize("seed", range(len(COMBINATIONS)))
def test_random_lives(seed: int) -> None:
    live_long(seed, *COMBINATIONS[seed], num_steps=200)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.timeout(900)
def test_many_lives() -> None:
    live(150, 80, derandomize=False)
    for number in range(5 * len(COMBINATIONS)):
        live_long(1000 + number, *COMBINATIONS[number % len(COMBINATIONS)], num_steps=150)
