"""What a subscriber of KV events believes to be cached, and what a prefix tree really has."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_proc.cache.events import AllBlocksCleared, BlockStored, Event, EventBus, as_numbers, page_hashes
from scheduler_proc.cache.groups import KEY_BYTES, Node
from scheduler_proc.cache.radix_tree import RadixTree

Block = tuple[bytes, int, int]
"""Namespace, group, hash."""


class KvMirror:
    """Follows the events of a bus. `problems`: events that make no sense after those before them."""

    def __init__(self, bus: EventBus) -> None:
        self.blocks: set[Block] = set()
        self.problems: list[str] = []
        bus.subscribe(self._hear)

    def _hear(self, event: Event) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        blocks = {(event.namespace, event.group, one) for one in event.block_hashes}
        if isinstance(event, BlockStored):
            if twice := blocks & self.blocks:
                self.problems.append(f"stored again: {twice}")
            self.blocks |= blocks
        else:
            if unknown := blocks - self.blocks:
                self.problems.append(f"removed, but not there: {unknown}")
            self.blocks -= blocks


def blocks_of(tree: RadixTree) -> set[Block]:
    """Every block that a match may find, hashed anew."""
    return {block for root in tree._roots.values() for block in _below(root, root.namespace, b"", tree)}


def _below(node: Node, namespace: bytes, before: bytes, tree: RadixTree) -> Iterator[Block]:
    for child in (node.children or {}).values():
        hashes = page_hashes(namespace, before, child.keys, tree.page_size * KEY_BYTES)
        for group, held in enumerate(child.pages):
            if held is not None:
                yield from ((namespace, group, one) for one in as_numbers(hashes))
        yield from _below(child, namespace, hashes[-8:], tree)
