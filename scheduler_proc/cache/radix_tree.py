"""The prefix cache: a radix tree over runs of cache keys, with the pages of every cache group on its nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_proc.cache.events import HASH_BYTES, EventBus, TreeEvents
from scheduler_proc.cache.eviction import Evictor, Policy
from scheduler_proc.cache.groups import (
    KEY_BYTES,
    NO_PAGE,
    PAGE_ID_BYTES,
    CacheGroup,
    Node,
    Root,
    changes,
    common_bytes,
    cut_to_usable,
    join_pages,
)
from scheduler_proc.cache.pins import Lock, PathLocks, Pins, held_pages

NO_PAGES = np.empty(0, dtype=np.int32)


class Match(NamedTuple):
    """The longest cached prefix that every group can use.

    `pages`: per group int32 [num_tokens / page_size], read-only. Of a window group, pages wholly before the last
    `window` tokens are -1: a lock on `node` would not keep them.
    """

    node: Node
    num_tokens: int
    pages: tuple[np.ndarray, ...]


class Inserted(NamedTuple):
    """What became of a caller's pages, per group.

    `num_new_pages`: taken by the tree. `duplicates`: int32, not taken; the caller still owns them. `pages`: int32
    [num_pages], read-only, the tree's own for the whole prefix; -1 where it has none and, as in Match, where a lock
    on `node` would not keep them.
    """

    node: Node
    num_new_pages: tuple[int, ...]
    duplicates: tuple[np.ndarray, ...]
    pages: tuple[np.ndarray, ...]


class RadixTree:
    """Cached prefixes by namespace. Keys are int64 [num_tokens]; all lengths are whole pages.

    `on_evict(group, pages, busy_until)` gives pages back: int32 [m], which steps up to `busy_until` may still read.
    `max_pinned_pages`, per group, bounds what pins keep. One thread; nothing here may be called from `on_evict`.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        *,
        policy: Policy = "lru",
        on_evict: Callable[[int, np.ndarray, int], None],
        clock: Callable[[], float] = time.monotonic,
        bus: EventBus | None = None,
        max_pinned_pages: Sequence[int] | None = None,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page size {page_size}; at least 1 is needed")
        if all(group.may_have_holes for group in groups):
            raise ValueError("the prefix cache needs a group of full attention: its pages carry the tree")
        self.groups = tuple(groups)
        self.page_size = page_size
        self._page_bytes = page_size * KEY_BYTES
        self._windows = [(index, group.window) for index, group in enumerate(groups) if group.may_have_holes]
        self._carriers = [index for index, group in enumerate(groups) if not group.may_have_holes]
        self._give_up = [self._hollow if group.may_have_holes else self._remove for group in groups]
        self._no_pages = (NO_PAGES,) * len(groups)
        self._on_evict = on_evict
        self._roots: dict[bytes, Root] = {}
        # Where matches in an unknown namespace end: such a namespace leaves no trace.
        self._nowhere = Root(b"")
        # Above the parts that were detached while somebody held them.
        self._detached: set[Node] = set()
        self._tick = 0
        self.version = 0
        """Changes whenever a lookup may find something else than before."""
        self._num_nodes = 0
        self._num_pages = [0] * len(groups)
        self._events = TreeEvents(bus, page_size, self._page_bytes)
        self._evictor = Evictor(groups, policy)
        self._locks = PathLocks(groups, self._released)
        self._pins = Pins(self._locks, clock, groups, max_pinned_pages)

    # Counts, all O(1).

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    @property
    def num_live_locks(self) -> int:
        """Locks not released, pins included."""
        return len(self._locks.live)

    @property
    def num_pins(self) -> int:
        return len(self._pins)

    @property
    def num_heap_operations(self) -> int:
        """Entries that eviction queues took in, moved or let go so far: what eviction costs."""
        return self._evictor.num_operations

    @property
    def num_heap_entries(self) -> int:
        return self._evictor.num_entries

    def num_pages(self, group: int) -> int:
        """Pages of `group` that the tree owns."""
        return self._num_pages[group]

    def num_locked(self, group: int) -> int:
        """Pages of `group` that locks or pins keep."""
        return self._locks.num_locked(group)

    def evictable(self, group: int) -> int:
        """Pages of `group` that `evict` can free now."""
        return self._num_pages[group] - self._locks.num_locked(group)

    # Finding and storing.

    def match(self, namespace: bytes, keys: np.ndarray, limit: int, *, hits: int = 1) -> Match:
        """The longest usable prefix of `keys`, of at most `limit` tokens; counts as a use of it, of `hits` hits."""
        root, path, num_tokens = self._find(namespace, keys, limit)
        if not path:
            return Match(root, 0, self._no_pages)
        if num_tokens < path[-1].end:
            path[-1] = self._split(path[-1], num_tokens)
        self._tick = tick = self._tick + 1
        for node in path:
            node.access = tick
            node.hits += hits
        held = [join_pages(path, group, self._page_bytes) for group in range(len(self.groups))]
        return Match(path[-1], num_tokens, self._shown(held, num_tokens))

    def look_up(self, namespace: bytes, keys: np.ndarray, limit: int) -> tuple[int, Node]:
        """Tokens that a match would find, and the node in which it would end; a use, but no hit.

        The tree keeps its shape: a prefix may end within the node. Not to be locked.
        """
        root, path, num_tokens = self._find(namespace, keys, limit)
        self._tick = tick = self._tick + 1
        for node in path:
            node.access = tick
        return num_tokens, path[-1] if path else root

    def hit(self, node: Node) -> None:
        """The path to `node` spared somebody its computation."""
        while node.parent is not None:
            node.hits += 1
            node = node.parent

    def _find(self, namespace: bytes, keys: np.ndarray, limit: int) -> tuple[Root, list[Node], int]:
        """The longest usable prefix: its root, its nodes, of which the last may reach further, and its tokens."""
        assert keys.dtype == np.int64, "prefix tree: keys are int64"
        size = max(0, min(len(keys), limit))
        data = keys[: size - size % self.page_size].tobytes()
        root = self._roots.get(namespace, self._nowhere)
        path, offset = self._walk(root, data)
        num_tokens = offset // KEY_BYTES
        if self._windows:
            num_tokens = cut_to_usable(path, num_tokens, self._windows)
        return root, path, num_tokens

    def insert(self, namespace: bytes, keys: np.ndarray, pages: Sequence[np.ndarray], *, priority: int = 0) -> Inserted:
        """Store a prefix of whole pages whose last writing step is done.

        `pages`: per group int32 [num_pages], -1 where the caller has none. The tree takes over the pages that it
        lacks. Of a full group, all must be given that the tree does not have.
        """
        assert keys.dtype == np.int64, "prefix tree: keys are int64"
        data = keys.tobytes()
        num_pages = len(data) // self._page_bytes
        assert num_pages * self._page_bytes == len(data), "prefix tree: inserted a broken page"
        for given in pages:
            assert given.dtype == np.int32 and len(given) == num_pages, "prefix tree: pages and keys disagree"
        root = self._roots.get(namespace, self._nowhere)
        if not data:
            return Inserted(root, (0,) * len(self.groups), self._no_pages, self._no_pages)
        path, offset = self._walk(root, data)
        if offset < len(data):
            for group in self._carriers:
                missing = pages[group][offset // self._page_bytes :] < 0
                assert not missing.any(), "prefix tree: a full group lacks pages"
        if path and offset < path[-1].end * KEY_BYTES:
            path[-1] = self._split(path[-1], offset // KEY_BYTES)
        self._tick = tick = self._tick + 1
        for node in path:
            node.access = tick
            if node.priority < priority:
                node.priority = priority
        num_new = [0] * len(self.groups)
        for group, _ in self._windows:
            if any(node.pages[group] is None for node in path):
                path = [part for node in path for part in self._adopt(node, group, pages[group], num_new)]
        if offset < len(data):
            if root is self._nowhere:
                root = self._roots[namespace] = Root(namespace)
            path += self._grow(path[-1] if path else root, data, offset, pages, priority, num_new)
        held = [join_pages(path, group, self._page_bytes) for group in range(len(self.groups))]
        duplicates = []
        for given, ids in zip(pages, held, strict=True):
            if ids == given.tobytes():
                duplicates.append(NO_PAGES)
            else:
                # Where the caller has a page, the tree has one by now.
                duplicates.append(given[(given != np.frombuffer(ids, np.int32)) & (given >= 0)])
        return Inserted(path[-1], tuple(num_new), tuple(duplicates), self._shown(held, path[-1].end))

    def _walk(self, node: Node, data: bytes) -> tuple[list[Node], int]:
        """The nodes that share keys with `data`, and how many bytes of it they cover; the last may reach further."""
        path = []
        offset = 0
        page_bytes = self._page_bytes
        while node.children is not None:
            # At the end of `data` this looks for b"", which is no child's key.
            child = node.children.get(data[offset : offset + page_bytes])
            if child is None:
                break
            path.append(child)
            if not data.startswith(child.keys, offset):
                offset += common_bytes(child.keys, data, offset, page_bytes)
                break
            offset += len(child.keys)
            node = child
        return path, offset

    def _shown(self, held: Sequence[bytes], num_tokens: int) -> tuple[np.ndarray, ...]:
        """Page ids as arrays, -1 where a lock on the prefix would not keep the page."""
        shown = [np.frombuffer(ids, np.int32) for ids in held]
        for group, window in self._windows:
            hidden = max(0, num_tokens - window) // self.page_size
            if hidden:
                shown[group] = np.frombuffer(NO_PAGE * hidden + held[group][hidden * PAGE_ID_BYTES :], np.int32)
        return tuple(shown)

    # Changing nodes.

    def _split(self, node: Node, end: int) -> Node:
        """Cut a node in two at token `end`; returns the new upper part. The lower stays the same object: locks name it.

        Both are slices of their own, so that neither keeps the other's memory alive.
        """
        parent = node.parent
        assert parent is not None and parent.children is not None
        num_pages = (end - parent.end) // self.page_size
        cut = num_pages * self._page_bytes
        cut_ids = num_pages * PAGE_ID_BYTES
        upper = Node(
            node.keys[:cut],
            tuple([held if held is None else held[:cut_ids] for held in node.pages]),
            parent,
            end,
            node.created,
            node.priority,
        )
        upper.access = node.access
        upper.hits = node.hits
        upper.busy_until = node.busy_until
        if node.hashes is not None:
            upper.hashes = node.hashes[: num_pages * HASH_BYTES]
            node.hashes = node.hashes[num_pages * HASH_BYTES :]
        parent.children[node.keys[: self._page_bytes]] = upper
        node.keys = node.keys[cut:]
        node.pages = tuple([held if held is None else held[cut_ids:] for held in node.pages])
        node.parent = upper
        upper.children = {node.keys[: self._page_bytes]: node}
        self._num_nodes += 1
        self._locks.split(upper, node)
        self._evictor.offer(upper)
        return upper

    def _adopt(self, node: Node, group: int, given: np.ndarray, num_new: list[int]) -> list[Node]:
        """Fill a tombstone with what the caller has, splitting where that changes; returns the parts, top first."""
        parent = node.parent
        assert parent is not None
        first = parent.end // self.page_size
        last = node.end // self.page_size
        offered = given[first:last]
        if node.pages[group] is not None or not (offered >= 0).any():
            return [node]
        parts = [self._split(node, cut * self.page_size) for cut in changes([given], first, last)]
        parts.append(node)
        for part in parts:
            num = len(part.keys) // self._page_bytes
            if given[first] >= 0:
                self.version += 1
                taken = given[first : first + num].tobytes()
                part.pages = (*part.pages[:group], taken, *part.pages[group + 1 :])
                num_new[group] += num
                self._num_pages[group] += num
                self._locks.adopted(part, group)
                self._evictor.offer(part)
                if self._events.active:
                    self._events.stored(part, group)
            first += num
        return parts

    def _grow(
        self,
        parent: Node,
        data: bytes,
        offset: int,
        pages: Sequence[np.ndarray],
        priority: int,
        num_new: list[int],
    ) -> list[Node]:
        """Hang the keys from `offset` on below `parent`: one node, or several where a window group has holes."""
        first = offset // self._page_bytes
        last = len(data) // self._page_bytes
        cuts = changes([pages[group] for group, _ in self._windows], first, last)
        nodes = []
        for end in (*cuts, last):
            keys = data[first * self._page_bytes : end * self._page_bytes]
            held = tuple([given[first:end].tobytes() if given[first] >= 0 else None for given in pages])
            node = Node(keys, held, parent, end * self.page_size, self._tick, priority)
            if parent.children is None:
                parent.children = {}
            parent.children[keys[: self._page_bytes]] = node
            for group, own in enumerate(held):
                if own is not None:
                    num_new[group] += end - first
                    self._num_pages[group] += end - first
            nodes.append(node)
            parent = node
            first = end
        self._num_nodes += len(nodes)
        self.version += 1
        for node in nodes:
            self._evictor.offer(node)
        if self._events.active:
            for node in nodes:
                for group, own in enumerate(node.pages):
                    if own is not None:
                        self._events.stored(node, group)
        return nodes

    def _remove(self, node: Node, _group: int) -> None:
        """Take an unlocked leaf out of the tree with the pages of all groups."""
        if self._events.active and not node.detached:
            for group, held in enumerate(node.pages):
                if held is not None:
                    self._events.removed(node, group)
        self._unlink(node)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and parent.children is not None and node.locks is None and node.children is None
        del parent.children[node.keys[: self._page_bytes]]
        held_by_group = node.pages
        # A queue may hold the node for a while: let go of what it holds.
        node.parent, node.keys, node.pages, node.hashes = None, b"", (), None
        self._num_nodes -= 1
        self.version += 1
        if not parent.children:
            parent.children = None
            if isinstance(parent, Root):
                self._forget(parent)
            else:
                self._evictor.offer(parent)
        for group, held in enumerate(held_by_group):
            if held is not None:
                self._num_pages[group] -= len(held) // PAGE_ID_BYTES
                self._on_evict(group, np.frombuffer(held, np.int32), node.busy_until)

    def _forget(self, root: Root) -> None:
        """A root has lost its last child."""
        if root in self._detached:
            self._detached.remove(root)
        else:
            del self._roots[root.namespace]

    def _hollow(self, node: Node, group: int) -> None:
        """Leave a tombstone in place of the node's pages of one group."""
        self.version += 1
        if self._events.active and not node.detached:
            self._events.removed(node, group)
        held = node.pages[group]
        assert held is not None
        node.pages = (*node.pages[:group], None, *node.pages[group + 1 :])
        self._num_pages[group] -= len(held) // PAGE_ID_BYTES
        self._on_evict(group, np.frombuffer(held, np.int32), node.busy_until)

    # Keeping and dropping.

    def lock(self, node: Node) -> Lock:
        """Keep the path to `node` (a window group: its last `window` tokens) until unlock."""
        return self._locks.lock(node)

    def unlock(self, lock: Lock, busy_until: int = 0) -> None:
        """Release; steps up to `busy_until` may still read the pages. Raises RuntimeError the second time."""
        self._locks.unlock(lock, busy_until)

    def evict(self, group: int, num_pages: int) -> int:
        """Free at least `num_pages` pages of `group`, or all that no lock keeps; returns how many. Whole nodes go."""
        give_up = self._give_up[group]
        freed = 0
        while freed < num_pages and (node := self._evictor.pop(group)) is not None:
            freed += held_pages(node, group)
            give_up(node, group)
        self._evictor.trim(self._num_nodes)
        return freed

    def touch(self, node: Node) -> None:
        """The path to `node` was used just now."""
        self._tick += 1
        while node.parent is not None:
            node.access = self._tick
            node = node.parent

    def detach(self, node: Node) -> None:
        """What is on the path to `node` cannot be trusted, nor what was computed from it: nobody finds it from now on.

        What locks keep stays for those who hold it, and goes with the last of them; pins of it end now.
        """
        if node.detached or node.parent is None:
            return
        top = node
        while not isinstance(top.parent, Root):
            assert top.parent is not None
            top = top.parent
        root = top.parent
        assert root.children is not None
        below = [top, *self._below([top])]
        for part in reversed(below):
            if self._events.active:
                for group, held in enumerate(part.pages):
                    if held is not None:
                        self._events.removed(part, group)
            part.detached = True
        first_page = top.keys[: self._page_bytes]
        del root.children[first_page]
        if not root.children:
            root.children = None
            self._forget(root)
        # The same way up as before, for locks; but nobody comes down it.
        top.parent = hidden = Root(root.namespace)
        hidden.children = {first_page: top}
        self._detached.add(hidden)
        self.version += 1
        for part in reversed(below):
            if part.locks is None:
                self._unlink(part)
        self._pins.drop_detached()
        self._evictor.trim(self._num_nodes)

    def _released(self, node: Node) -> None:
        """A node has lost its last lock in some group."""
        if node.detached and node.locks is None:
            self._unlink(node)
            self._evictor.trim(self._num_nodes)
        else:
            self._evictor.offer(node)

    def pin(self, namespace: bytes, keys: np.ndarray, ttl_s: float) -> tuple[int, int]:
        """Keep what is cached of a prefix for `ttl_s` seconds: number of the pin, tokens kept ((0, 0) if none is).

        Raises InvalidRequestError for a ttl that is not positive, and beyond `max_pinned_pages`.
        """
        match = self.match(namespace, keys, len(keys))
        if match.num_tokens == 0:
            return 0, 0
        return self._pins.add(match.node, ttl_s), match.num_tokens

    def unpin(self, pin_id: int) -> bool:
        """End a pin; False when it has ended or never was."""
        return self._pins.remove(pin_id)

    def drop_pin(self) -> bool:
        """A request can go on no other way: end the oldest pin; False when there is none."""
        return self._pins.drop_oldest()

    def expire_pins(self) -> int:
        """End the pins whose time is over; returns how many. Costs one look at a heap when none is."""
        return self._pins.expire()

    def flush(self) -> int:
        """Drop all pins and everything that no lock keeps; returns the pages of group 0 that this freed."""
        self._pins.clear()
        before = self._num_pages[0]
        empties = not any(self.num_locked(group) for group in range(len(self.groups)))
        for node in reversed(list(self._nodes())):
            if empties:
                self._unlink(node)
            elif node.locks is None:
                self._remove(node, 0)
            else:
                for group, _ in self._windows:
                    if node.locks[group] == 0 and node.pages[group] is not None:
                        self._hollow(node, group)
        self._evictor.trim(self._num_nodes)
        if empties and self._events.active:
            self._events.cleared()
        return before - self._num_pages[0]

    # Audits.

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents before children."""
        yield from self._below([*self._roots.values(), *self._detached])

    @staticmethod
    def _below(nodes: list[Node]) -> Iterator[Node]:
        """All that hangs below `nodes`, parents before children."""
        stack = list(nodes)
        while stack:
            children = stack.pop().children
            if children is not None:
                yield from children.values()
                stack.extend(children.values())

    def owned_pages(self, group: int) -> np.ndarray:
        """int32: every page of `group` in the tree, found by walking it."""
        held = (node.pages[group] for node in self._nodes())
        return np.frombuffer(b"".join(pages for pages in held if pages is not None), np.int32)

    def check(self) -> list[str]:
        """Recount everything; returns one line for each thing wrong, [] = sound."""
        nodes = list(self._nodes())
        problems = [line for node in nodes for line in node.check(self.groups, self.page_size)]
        for namespace, root in self._roots.items():
            if root.namespace != namespace or not root.children:
                problems.append(f"namespace {namespace!r}: a root under another's name, or without children")
        findable = set(self._below(list(self._roots.values())))
        for node in nodes:
            if node.detached == (node in findable):
                problems.append(f"node ending at {node.end}: its mark for being detached is wrong")
            if node.detached and node.locks is None:
                problems.append(f"node ending at {node.end}: detached and held by nobody")
        if self._nowhere.children is not None:
            problems.append("the root of unknown namespaces has children")
        if len(nodes) != self._num_nodes:
            problems.append(f"{self._num_nodes} nodes counted, {len(nodes)} found")
        for group, spec in enumerate(self.groups):
            pages = self.owned_pages(group)
            if len(pages) != self._num_pages[group]:
                problems.append(f"{self._num_pages[group]} pages of {spec.name} counted, {len(pages)} found")
            if len(np.unique(pages)) != len(pages):
                problems.append(f"a page of {spec.name} is in the tree twice")
        return [*problems, *self._locks.check(nodes), *self._evictor.check(nodes), *self._pins.check()]
