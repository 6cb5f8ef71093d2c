"""What goes first when pages run out: one heap of leaves, and one heap per group whose pages may go alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from scheduler_proc.cache.groups import CacheGroup, Node

Policy = Literal["lru", "lfu", "fifo", "priority"]
Entry = tuple[int, int, int, Node]

# Ranks only grow while a node lives; EvictionQueue relies on it. The last number puts nodes near the root first.
RANKS: dict[Policy, Callable[[Node], Entry]] = {
    "lru": lambda node: (node.access, 0, node.end, node),
    "lfu": lambda node: (node.hits, node.access, node.end, node),
    "fifo": lambda node: (node.created, 0, node.end, node),
    "priority": lambda node: (node.priority, node.access, node.end, node),
}

# Below this many entries a heap is not worth cleaning.
SMALL_HEAP = 64


def is_free_leaf(node: Node) -> bool:
    """In the tree, without children and without locks."""
    return node.children is None and node.locks is None and node.parent is not None


def holds_free_pages(group: int) -> Callable[[Node], bool]:
    """Whether a node of the tree has pages of `group` that no lock keeps."""

    def test(node: Node) -> bool:
        if node.parent is None or node.pages[group] is None:
            return False
        return node.locks is None or node.locks[group] == 0

    return test


class EvictionQueue:
    """A heap with at most one entry per node, checked only when it comes to the top.

    Touching a node costs nothing here: its entry is too early then, and is moved back when it surfaces. Entries of
    nodes that may not go are dropped when they surface; whoever makes such a node eligible again offers it.
    """

    def __init__(self, bit: int, rank: Callable[[Node], Entry], eligible: Callable[[Node], bool]) -> None:
        self._bit = bit
        self._rank = rank
        self._eligible = eligible
        self._heap: list[Entry] = []
        self.num_operations = 0

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """Enter a node, if it may go and is not here yet."""
        if not node.queued & self._bit and self._eligible(node):
            node.queued |= self._bit
            self.num_operations += 1
            heapq.heappush(self._heap, self._rank(node))

    def pop(self) -> Node | None:
        """Take out the eligible node that goes first."""
        heap = self._heap
        while heap:
            self.num_operations += 1
            entry = heap[0]
            node = entry[3]
            if self._eligible(node):
                now = self._rank(node)
                if now != entry:
                    heapq.heapreplace(heap, now)
                    continue
                heapq.heappop(heap)
                node.queued &= ~self._bit
                return node
            heapq.heappop(heap)
            node.queued &= ~self._bit
        return None

    def trim(self, num_nodes: int) -> None:
        """Throw out stale entries once they outnumber the tree's nodes."""
        if len(self._heap) <= 2 * num_nodes + SMALL_HEAP:
            return
        kept = []
        for entry in self._heap:
            if self._eligible(entry[3]):
                kept.append(self._rank(entry[3]))
            else:
                entry[3].queued &= ~self._bit
        heapq.heapify(kept)
        self._heap = kept

    def check(self, name: str, nodes: Sequence[Node]) -> list[str]:
        """One line for each thing wrong, given all nodes of the tree."""
        heap = self._heap
        problems = []
        if any(heap[i] < heap[(i - 1) // 2] for i in range(1, len(heap))):
            problems.append(f"{name}: not a heap")
        entered = {id(entry[3]) for entry in heap}
        if len(entered) != len(heap):
            problems.append(f"{name}: a node is in it twice")
        if any(self._rank(entry[3]) < entry for entry in heap if entry[3].parent is not None):
            problems.append(f"{name}: an entry is later than its node")
        for node in nodes:
            if bool(node.queued & self._bit) != (id(node) in entered):
                problems.append(f"{name}: the mark of the node ending at {node.end} is wrong")
            if self._eligible(node) and id(node) not in entered:
                problems.append(f"{name}: the node ending at {node.end} may go and is not in it")
        if len(heap) > 2 * len(nodes) + SMALL_HEAP:
            problems.append(f"{name}: {len(heap)} entries for {len(nodes)} nodes")
        return problems


class Evictor:
    """The queues of one tree. Groups without holes share the leaves: a leaf goes with the pages of all groups."""

    def __init__(self, groups: Sequence[CacheGroup], policy: Policy) -> None:
        if policy not in RANKS:
            raise ValueError(f"eviction policy {policy!r}; known are {', '.join(RANKS)}")
        rank = RANKS[policy]
        leaves = EvictionQueue(1, rank, is_free_leaf)
        alone = {
            index: EvictionQueue(2 << index, rank, holds_free_pages(index))
            for index, group in enumerate(groups)
            if group.may_have_holes
        }
        self._of_group = [alone.get(index, leaves) for index in range(len(groups))]
        self._queues = {"leaves": leaves, **{f"queue of {groups[index].name}": queue for index, queue in alone.items()}}
        self._each = tuple(self._queues.values())

    @property
    def num_operations(self) -> int:
        """Heap entries put in, moved or taken out so far."""
        return sum(queue.num_operations for queue in self._each)

    @property
    def num_entries(self) -> int:
        return sum(len(queue) for queue in self._each)

    def offer(self, node: Node) -> None:
        """A node was made, became a leaf, got pages or lost a lock."""
        for queue in self._each:
            queue.offer(node)

    def pop(self, group: int) -> Node | None:
        """The node that gives up its pages of `group` next; None when all are locked."""
        return self._of_group[group].pop()

    def trim(self, num_nodes: int) -> None:
        """To be called after nodes were removed."""
        for queue in self._each:
            queue.trim(num_nodes)

    def check(self, nodes: Iterable[Node]) -> list[str]:
        """One line for each thing wrong, given all nodes of the tree."""
        alive = list(nodes)
        return [line for name, queue in self._queues.items() for line in queue.check(name, alive)]
