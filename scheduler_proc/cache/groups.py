"""Cache groups, and the node of the prefix tree: a run of keys and, per group, its pages or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

KEY_BYTES = 8
PAGE_ID_BYTES = 4
# Longer than any prefix: a group with this reach needs every token before.
WHOLE = 1 << 62
NO_PAGE = np.full(1, -1, dtype=np.int32).tobytes()


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share a pool. `window` (tokens) only for kind "window"; raises ValueError when they disagree."""

    name: str
    kind: Literal["full", "window"]
    window: int = 0

    def __post_init__(self) -> None:
        if self.kind == "window" and self.window < 1:
            raise ValueError(f"cache group {self.name}: a window of {self.window} tokens; at least 1 is needed")
        if self.kind == "full" and self.window != 0:
            raise ValueError(f"cache group {self.name}: full attention has no window (got {self.window})")

    @property
    def reach(self) -> int:
        """How many tokens at the end of a prefix must be cached before it can be used (all of a shorter one)."""
        return self.window if self.kind == "window" else WHOLE

    @property
    def may_have_holes(self) -> bool:
        """A node may lose this group's pages and stay in the tree."""
        return self.kind == "window"


class Node:
    """One edge of the tree and what lies at its end. Only the tree and its parts change it.

    Keys and page ids are bytes: a third of an array's size, compared by memcmp, and never changed under a reader.
    Ticks count the tree's operations, so that no two of them are at the same time.
    """

    __slots__ = (
        "access",  # tick of the last match or insert that went through here
        "busy_until",  # largest step that may still read these pages
        "children",  # first page of keys -> Node; None = leaf
        "created",  # tick
        "detached",  # its keys lead here no more: what is here lives as long as its locks
        "end",  # tokens from the root to the end of this edge
        "hashes",  # 8 bytes a page; None until an event needs them
        "hits",  # matches that went through here
        "keys",  # int64 [whole pages]
        "locks",  # locks held, per group; None = none at all
        "pages",  # per group int32 [num_pages]; None = tombstone
        "parent",  # None = a root, or no longer in the tree
        "priority",
        "queued",  # bit per eviction queue that has an entry for this node
        "starts",  # (group, token) -> locks whose window begins inside this edge; None = none
    )

    def __init__(
        self, keys: bytes, pages: tuple[bytes | None, ...], parent: Node | None, end: int, tick: int, priority: int
    ) -> None:
        self.keys = keys
        self.pages = pages
        self.parent = parent
        self.end = end
        self.access = self.created = tick
        self.priority = priority
        self.hits = 0
        self.busy_until = 0
        self.queued = 0
        self.detached = False
        self.children: dict[bytes, Node] | None = None
        self.locks: list[int] | None = None
        self.starts: dict[tuple[int, int], int] | None = None
        self.hashes: bytes | None = None

    def check(self, groups: Sequence[CacheGroup], page_size: int) -> list[str]:
        """One line for each thing wrong with this node, its pages and its link to its parent."""
        where = f"node ending at {self.end}"
        parent = self.parent
        if parent is None:
            return [f"{where}: in the tree, but without a parent"]
        problems = []
        num_pages, rest = divmod(len(self.keys), page_size * KEY_BYTES)
        if rest or num_pages == 0:
            problems.append(f"{where}: {len(self.keys)} bytes of keys are not whole pages")
        if self.end - parent.end != num_pages * page_size:
            problems.append(f"{where}: {num_pages} pages of keys from {parent.end}")
        if parent.children is None or parent.children.get(self.keys[: page_size * KEY_BYTES]) is not self:
            problems.append(f"{where}: its parent has it under other keys")
        if self.children is not None and not self.children:
            problems.append(f"{where}: an empty table of children")
        for group, held in zip(groups, self.pages, strict=True):
            if held is None:
                if not group.may_have_holes:
                    problems.append(f"{where}: no pages of {group.name}")
            elif len(held) != num_pages * PAGE_ID_BYTES:
                problems.append(f"{where}: {len(held) // PAGE_ID_BYTES} pages of {group.name} for {num_pages}")
        if self.hashes is not None and len(self.hashes) != 8 * num_pages:
            problems.append(f"{where}: {len(self.hashes)} bytes of hashes for {num_pages} pages")
        return problems

    def __lt__(self, other: Node) -> bool:
        """Any order will do: heaps ask only when two ranks are equal."""
        return id(self) < id(other)


class Root(Node):
    """The node above all prefixes of one namespace; holds no pages and is never locked."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: bytes) -> None:
        super().__init__(b"", (), None, 0, 0, 0)
        self.namespace = namespace
        self.hashes = b""


def common_bytes(edge: bytes, data: bytes, offset: int, page_bytes: int) -> int:
    """Length of the equal whole pages at the start of `edge` and of data[offset:]."""
    num = min(len(edge), len(data) - offset) // KEY_BYTES
    differs = np.frombuffer(edge, np.int64, num) != np.frombuffer(data, np.int64, num, offset)
    first = int(differs.argmax())
    equal = (first if differs[first] else num) * KEY_BYTES
    return equal - equal % page_bytes


def cut_to_usable(path: list[Node], num_tokens: int, windows: Sequence[tuple[int, int]]) -> int:
    """Cut `path` to the longest prefix whose last window has pages in each of `windows` (group, tokens).

    Returns its tokens. Only ends of nodes come into question: within a node, a longer prefix is never worse.
    """
    gaps = [0] * len(windows)
    depth = usable = 0
    for position, node in enumerate(path, 1):
        end = min(node.end, num_tokens)
        good = True
        for number, (group, window) in enumerate(windows):
            if node.pages[group] is None:
                gaps[number] = end
                good = False
            elif gaps[number] and end - gaps[number] < window:
                good = False
        if good:
            depth, usable = position, end
    del path[depth:]
    return usable


def join_pages(path: Sequence[Node], group: int, page_bytes: int) -> bytes:
    """The page ids of a path, -1 for tombstones."""
    parts = []
    for node in path:
        held = node.pages[group]
        parts.append(held if held is not None else NO_PAGE * (len(node.keys) // page_bytes))
    return b"".join(parts)


def changes(given: Sequence[np.ndarray], first: int, last: int) -> list[int]:
    """Pages after `first` and before `last` at which one of the arrays (-1 = none) starts or stops having pages."""
    cuts: set[int] = set()
    for pages in given:
        absent = pages[first:last] < 0
        cuts.update((np.flatnonzero(absent[1:] != absent[:-1]) + (first + 1)).tolist())
    return sorted(cuts)
