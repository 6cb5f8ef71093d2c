"""The order of the queue: who is tried first when there is room.

A policy orders the waiting requests; ageing puts those that were overtaken too often in front of everybody, oldest
first, whatever the policy thinks of them. Cache-aware policies look at the first LOOKED_AT requests by arrival only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from scheduler_proc.cache.groups import Node
from scheduler_proc.request import Request

LOOKED_AT = 128
"""Most waiting requests a cache-aware policy compares in one step; the rest stand behind them in order of arrival."""
OVERTAKEN_LIMIT = 64
"""Admissions of later arrivals after which a request goes to the front."""
PRIORITY_AGEING = 64
"""Overtakings that count as one level of priority."""


class CachedPrefix(Protocol):
    """Looks a request up in the prefix cache; what somebody waits for counts as used."""

    def __call__(self, request: Request) -> tuple[int, Node | None]:
        """Cached tokens, and the node within which they end; None without a cache."""
        ...


Order = Callable[[Sequence[Request]], list[Request]]


def make_order(
    name: str,
    cached: CachedPrefix,
    overtaken: Callable[[Request], int],
    seed: int,
    num_admitted: Callable[[], int] = lambda: 0,
) -> Order:
    """The policy called `name`: fcfs, lpm, lof, dfs-weight, random or priority.

    seed, num_admitted (requests admitted so far): what `random` draws from, besides a request's own arrival.
    """
    if name == "lpm":
        return lambda waiting: _aged(waiting, overtaken, lambda some: _by_cached(some, cached))
    if name == "dfs-weight":
        return lambda waiting: _aged(waiting, overtaken, lambda some: _depth_first(some, cached))
    if name == "lof":
        return lambda waiting: _aged(
            waiting, overtaken, lambda some: sorted(some, key=lambda r: (-r.max_output, r.arrival))
        )
    if name == "random":
        return lambda waiting: _aged(waiting, overtaken, lambda some: _drawn(some, seed, num_admitted()))
    if name == "priority":
        return lambda waiting: sorted(waiting, key=lambda r: (-effective_priority(r, overtaken(r)), r.arrival))
    return lambda waiting: sorted(waiting, key=lambda r: r.arrival)


def effective_priority(request: Request, overtaken: int) -> int:
    """Its priority, raised by one level for every PRIORITY_AGEING times it was overtaken."""
    return request.priority + overtaken // PRIORITY_AGEING


def _aged(waiting: Sequence[Request], overtaken: Callable[[Request], int], order: Order) -> list[Request]:
    by_arrival = sorted(waiting, key=lambda r: r.arrival)
    old: list[Request] = []
    young: list[Request] = []
    for request in by_arrival:
        (old if overtaken(request) >= OVERTAKEN_LIMIT else young).append(request)
    return old + order(young[:LOOKED_AT]) + young[LOOKED_AT:]


def _drawn(waiting: Sequence[Request], seed: int, num_admitted: int) -> list[Request]:
    """A random order that stays until somebody is admitted, however often it is looked at."""

    def rank(request: Request) -> bytes:
        return hashlib.blake2b(f"{seed} {num_admitted} {request.arrival}".encode(), digest_size=8).digest()

    return sorted(waiting, key=rank)


def _by_cached(waiting: Sequence[Request], cached: CachedPrefix) -> list[Request]:
    return sorted(waiting, key=lambda r: (-cached(r)[0], r.arrival))


def _depth_first(waiting: Sequence[Request], cached: CachedPrefix) -> list[Request]:
    """Walk the tree's branches depth first, the one with the most waiting requests first, children before parents.

    Requests that share a long prefix come one after the other, so that it is in use while it is needed.
    """
    at: dict[Node | None, list[tuple[int, Request]]] = {}
    for request in waiting:
        num_tokens, node = cached(request)
        at.setdefault(node, []).append((num_tokens, request))
    children, roots = _branches(node for node in at if node is not None)
    weight: dict[Node, int] = {}
    for node in reversed(_parents_first(children, roots)):
        weight[node] = len(at.get(node, ())) + sum(weight[child] for child in children[node])
    ordered: list[Request] = []
    stack = [(node, False) for node in sorted(roots, key=weight.__getitem__)]
    while stack:
        node, is_walked = stack.pop()
        if is_walked:
            # What ends at a node has less in the tree than what ends below it: it comes after.
            ordered += _by_length(at.get(node, ()))
            continue
        stack.append((node, True))
        stack += [(child, False) for child in sorted(children[node], key=weight.__getitem__)]
    return ordered + _by_length(at.get(None, ()))


def _by_length(found: Sequence[tuple[int, Request]]) -> list[Request]:
    return [request for _, request in sorted(found, key=lambda item: (-item[0], item[1].arrival))]


def _branches(ends: Iterable[Node]) -> tuple[dict[Node, list[Node]], list[Node]]:
    """The part of the tree above `ends`: each node's children in it, and its roots."""
    children: dict[Node, list[Node]] = {}
    roots = []
    for end in ends:
        node, child = end, None
        while True:
            is_known = node in children
            below = children.setdefault(node, [])
            if child is not None:
                below.append(child)
            if is_known:
                break
            if node.parent is None:
                roots.append(node)
                break
            node, child = node.parent, node
    return children, roots


def _parents_first(children: dict[Node, list[Node]], roots: list[Node]) -> list[Node]:
    ordered, stack = [], list(roots)
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack += children[node]
    return ordered
