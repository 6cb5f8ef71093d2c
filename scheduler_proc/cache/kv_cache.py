"""All KV memory of one scheduler: page pools, page tables and the prefix tree, for every cache group together.

The planner asks for room; who owns which page is decided here and nowhere else: free list, tree, a slot's tail, or in
flight until the steps that may touch it are collected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler_proc.cache.groups import CacheGroup, Node
from scheduler_proc.cache.page_pool import PagePool
from scheduler_proc.cache.page_table import PageTable
from scheduler_proc.cache.radix_tree import Lock, Match, RadixTree
from scheduler_proc.plan import PageUpdates
from scheduler_proc.request import Request

RESERVED_TOKENS = 16
"""Tokens ahead for which a decoding row reserves pages, so that a steady step uploads nothing."""
RESERVED_IF_ROOMY = 64
"""The same while most pages are free: fewer steps have anything to look after."""


class KvCache:
    """Pages of `num_slots` slots in every group of `groups`; with `tree` None nothing is shared."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int,
        num_slots: int,
        max_len: int,
        make_tree: Callable[[Callable[[int, np.ndarray, int], None]], RadixTree] | None,
        pages_freed: Callable[[np.ndarray], None],
    ) -> None:
        self.groups = tuple(groups)
        self.has_windows = any(group.kind == "window" for group in self.groups)
        self.page_size = page_size
        self.pools = tuple(PagePool(num, page_size, pages_freed) for num in num_pages)
        max_pages = -(-max_len // page_size)
        self.tables = tuple(PageTable(num_slots, max_pages) for _ in groups)
        self.newest_in_flight: int | None = None
        """Newest launched step whose result was not collected; None = the device is idle."""
        self.last_collected = 0
        """Newest step whose result was collected."""
        self._locks: list[Lock | None] = [None] * num_slots
        self._found = [0] * num_slots
        """Tokens of each slot that came from the tree when it began."""
        self.tree = None if make_tree is None else make_tree(self._evicted)

    # -- room -----------------------------------------------------------------------------------------------------

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    @property
    def max_tokens(self) -> int:
        """Most tokens that one request can ever hold: what the full groups' pools have."""
        full = [pool.num_pages for pool, group in zip(self.pools, self.groups, strict=True) if group.kind == "full"]
        return min(full) * self.page_size

    @property
    def is_roomy(self) -> bool:
        """More than a quarter of the pages is free: decoding rows may reserve more than they need soon."""
        return all(4 * pool.num_free > pool.num_pages for pool in self.pools)

    @property
    def in_flight(self) -> bool:
        """Pages are on their way back to a free list."""
        return any(pool.num_in_flight for pool in self.pools)

    def available(self, group: int) -> int:
        """Pages that are free or can be made free at once."""
        evictable = 0 if self.tree is None else self.tree.evictable(group)
        return self.pools[group].num_free + evictable

    def num_own(self, slot: int) -> int:
        """Pages that come free if the slot's occupant leaves: all that it did not find in the tree."""
        return int(self.tables[0].num[slot]) - self._found[slot] // self.page_size

    def drop_pin(self) -> bool:
        """Nothing else can give pages and a request needs them: end the oldest pin; False if there is none."""
        return self.tree is not None and self.tree.drop_pin()

    def make_room(self, group: int, num: int) -> bool:
        """See that `num` pages of a group are free now, evicting if needed; False if that cannot be."""
        pool = self.pools[group]
        if pool.num_free < num and self.tree is not None:
            self.tree.evict(group, num - pool.num_free)
        return pool.num_free >= num

    # -- a request's life -----------------------------------------------------------------------------------------

    def match(self, request: Request) -> Match | None:
        """The longest cached prefix that a request may take; None without a tree."""
        if self.tree is None:
            return None
        return self.tree.match(request.namespace, request.keys, request.most_cached, hits=0)

    def look_up(self, request: Request) -> tuple[int, Node | None]:
        """Tokens of that prefix, and the node in which it ends, for comparison only."""
        if self.tree is None:
            return 0, None
        return self.tree.look_up(request.namespace, request.keys, request.most_cached)

    def num_shared(self, slot: int) -> int:
        """Tokens of a slot's that are in the tree."""
        return int(self.tables[0].shared[slot]) * self.page_size

    def hold(self, match: Match | None) -> Lock | None:
        """Keep a match from eviction while its admission is decided."""
        return None if match is None or self.tree is None else self.tree.lock(match.node)

    def let_go(self, lock: Lock | None) -> None:
        """The admission did not happen."""
        if lock is not None and self.tree is not None:
            self.tree.unlock(lock)

    def begin(self, slot: int, match: Match | None, lock: Lock | None) -> None:
        """A new occupant of a slot starts from its match; an exception leaves the slot as it was."""
        if match is not None and self.tree is not None:
            try:
                for table, pages in zip(self.tables, match.pages, strict=True):
                    table.begin(slot, pages)
            except Exception:
                for table in self.tables:
                    table.end(slot)
                raise
            self.tree.hit(match.node)
        self._locks[slot] = lock
        self._found[slot] = 0 if match is None else match.num_tokens

    def grow(self, slot: int, num_tokens: int) -> bool:
        """Pages for the first `num_tokens` tokens of a slot; False (and nothing taken) if a group has no room."""
        wanted = self.pages_for(num_tokens)
        short = [wanted - int(table.num[slot]) for table in self.tables]
        if not all(self.make_room(group, num) for group, num in enumerate(short) if num > 0):
            return False
        for table, pool, num in zip(self.tables, self.pools, short, strict=True):
            if num > 0:
                table.extend(slot, pool.take(num))
        return True

    def room_left(self, index: np.ndarray | slice, planned: np.ndarray) -> np.ndarray:
        """int32: tokens that still go into the pages of the slots at `index`, which hold `planned` tokens."""
        return self.tables[0].num[index] * self.page_size - planned

    def reserve(self, rows: np.ndarray, longest: np.ndarray) -> None:
        """The next page for each of `rows` (room was made), and pages ahead while they may grow and there is room.

        longest: int32 [len(rows)], tokens a row can reach at most.
        """
        ahead = max(1, (RESERVED_IF_ROOMY if self.is_roomy else RESERVED_TOKENS) // self.page_size)
        while len(rows):
            # All in one go if every row can use all of them; else the next page each, and look again.
            grows = (self.tables[0].num[rows] + (ahead - 1)) * self.page_size < longest
            num = ahead if grows.all() and all(pool.num_free >= ahead * len(rows) for pool in self.pools) else 1
            for table, pool in zip(self.tables, self.pools, strict=True):
                table.append(rows, pool.take(num * len(rows)))
            ahead -= num
            grows = self.tables[0].num[rows] * self.page_size < longest
            rows, longest = rows[grows], longest[grows]
            if ahead == 0 or any(pool.num_free < len(rows) for pool in self.pools):
                return

    def leave_window(self, rows: np.ndarray, planned: np.ndarray) -> None:
        """Give back what has fallen out of the windows of `rows`."""
        for table, pool, group in zip(self.tables, self.pools, self.groups, strict=True):
            if group.kind != "window":
                continue
            # A query at position `planned` still sees the `window` - 1 keys before it.
            first = np.minimum(np.maximum(planned[rows] + 1 - group.window, 0) // self.page_size, table.num[rows])
            for slot, until in zip(rows.tolist(), first.tolist(), strict=True):
                start = max(int(table.first[slot]), int(table.shared[slot]))
                if until > start:
                    pool.give_back(table.pages[slot, start:until], self.newest_in_flight)
                table.first[slot] = max(until, int(table.first[slot]))

    def commit(self, slot: int, request: Request, num_tokens: int, keys: np.ndarray | None = None) -> None:
        """Put the whole pages of a slot's first `num_tokens` tokens, all collected, into the tree; keep them locked."""
        num_pages = num_tokens // self.page_size
        if self.tree is None or num_pages <= int(self.tables[0].shared[slot]) or self._is_detached(slot):
            return
        node = self._insert(slot, request, num_pages, request.keys if keys is None else keys)
        lock = self.tree.lock(node)
        old, self._locks[slot] = self._locks[slot], lock
        if old is not None:
            self.tree.unlock(old, self.newest_in_flight or 0)

    def end(
        self, slot: int, request: Request, num_tokens: int, keys: np.ndarray | None, *, broken: bool = False
    ) -> None:
        """The occupant leaves; with `keys` the whole pages of its first `num_tokens` tokens stay in the tree.

        broken: what it has computed cannot be trusted, nor what it was computed from: all of it leaves the tree.
        """
        if keys is not None and self.tree is not None and not self._is_detached(slot):
            num_pages = num_tokens // self.page_size
            if num_pages > int(self.tables[0].shared[slot]):
                # Locked for a moment, so that the tree learns which steps still read the new pages.
                new = self.tree.lock(self._insert(slot, request, num_pages, keys))
                self.tree.unlock(new, self.newest_in_flight or 0)
        lock, self._locks[slot] = self._locks[slot], None
        if lock is not None:
            assert self.tree is not None
            self.tree.touch(lock.node)
            if broken:
                self.tree.detach(lock.node)
            self.tree.unlock(lock, self.newest_in_flight or 0)
        for table, pool in zip(self.tables, self.pools, strict=True):
            pool.give_back(table.end(slot), self.newest_in_flight)

    def _is_detached(self, slot: int) -> bool:
        """What the slot began from left the tree for good: its own pages must not go where that was."""
        lock = self._locks[slot]
        return lock is not None and lock.node.detached

    def _insert(self, slot: int, request: Request, num_pages: int, keys: np.ndarray) -> Node:
        assert self.tree is not None
        own = [table.prefix(slot, num_pages) for table in self.tables]
        whole = keys[: num_pages * self.page_size]
        inserted = self.tree.insert(request.namespace, whole, own, priority=request.priority)
        for group, table in enumerate(self.tables):
            table.share(slot, inserted.pages[group])
            self.pools[group].give_back(inserted.duplicates[group], self.newest_in_flight)
        return inserted.node

    # -- steps ----------------------------------------------------------------------------------------------------

    def launched(self, step: int) -> None:
        self.newest_in_flight = step

    def collected(self, step: int) -> None:
        """Step `step` and all before it are done: the pages that waited for them are free."""
        self.last_collected = step
        if step == self.newest_in_flight:
            self.newest_in_flight = None
        for pool in self.pools:
            pool.step_done(step)

    def take_updates(self) -> tuple[PageUpdates | None, ...]:
        """What the device must hear of page tables, by group."""
        return tuple(table.take_updates() for table in self.tables)

    def _evicted(self, group: int, pages: np.ndarray, busy_until: int) -> None:
        """The tree let pages go; a step that still reads them keeps them in flight."""
        self.pools[group].give_back(pages, busy_until if busy_until > self.last_collected else None)

    # -- looking in -----------------------------------------------------------------------------------------------

    def reclaim(self) -> None:
        """Nothing runs: every page that is neither in the tree nor in flight is free, whatever the books say."""
        for index, pool in enumerate(self.pools):
            pool.reclaim(np.zeros(0, np.int32) if self.tree is None else self.tree.owned_pages(index))

    def audit(self, slots: np.ndarray) -> list[str]:
        """Every page's owners rebuilt, over free lists, tree, the tails of the used `slots`, and steps in flight."""
        problems = [] if self.tree is None else self.tree.check()
        used = set(slots.tolist())
        held = [slot for slot, lock in enumerate(self._locks) if lock is not None]
        problems += [f"slot {slot}: free, but with a lock" for slot in held if slot not in used]
        if self.tree is not None:
            problems += [f"slot {slot}: without a lock" for slot in sorted(used.difference(held))]
            known = len(held) + self.tree.num_pins
            if self.tree.num_live_locks != known:
                problems.append(f"{self.tree.num_live_locks} locks live, {known} are held by slots and pins")
        for index, (table, pool) in enumerate(zip(self.tables, self.pools, strict=True)):
            owners = {f"slot {slot}": table.tail(slot) for slot in slots.tolist()}
            if self.tree is not None:
                owners["tree"] = self.tree.owned_pages(index)
            problems += [f"{self.groups[index].name}: {problem}" for problem in pool.audit(owners)]
        return problems
