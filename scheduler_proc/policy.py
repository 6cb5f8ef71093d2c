"""The order of the queue: who is tried first when there is room.

A policy orders the waiting requests; ageing puts those that were overtaken too often in front of everybody, oldest
first, whatever the policy thinks of them. Cache-aware policies look at the first LOOKED_AT requests by arrival only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

from scheduler_proc.request import Request

LOOKED_AT = 128
"""Most waiting requests a cache-aware policy compares in one step; the rest stand behind them in order of arrival."""
OVERTAKEN_LIMIT = 64
"""Admissions of later arrivals after which a request goes to the front."""
PRIORITY_AGEING = 64
"""Overtakings that count as one level of priority."""


class CachedPrefix(Protocol):
    """Looks a request up in the prefix cache; what somebody waits for counts as used."""

    def __call__(self, request: Request) -> tuple[int, object]:
        """Cached tokens, and the node where the match ends."""
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
    old = [r for r in by_arrival if overtaken(r) >= OVERTAKEN_LIMIT]
    young = [r for r in by_arrival if overtaken(r) < OVERTAKEN_LIMIT]
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
    at: dict[int, list[Request]] = {}
    children: dict[int, list[int]] = {}
    weight: dict[int, int] = {}
    roots: list[int] = []
    # A look-up may split nodes: only when all are done do the branches stay as they are.
    ends = [cached(request)[1] for request in waiting]
    for request, node in zip(waiting, ends, strict=True):
        at.setdefault(id(node), []).append(request)
        child: int | None = None
        while node is not None:
            key = id(node)
            weight[key] = weight.get(key, 0) + 1
            below = children.setdefault(key, [])
            if child is not None and child not in below:
                below.append(child)
            child, node = key, getattr(node, "parent", None)
        if child is not None and child not in roots:
            roots.append(child)
    ordered: list[Request] = []
    stack = [(key, False) for key in sorted(roots, key=lambda key: weight[key])]
    while stack:
        key, is_walked = stack.pop()
        if is_walked:
            # What ends at a node has less in the tree than what ends below it: it comes after.
            ordered += sorted(at.get(key, ()), key=lambda r: r.arrival)
            continue
        stack.append((key, True))
        stack += [(below, False) for below in sorted(children[key], key=lambda below: weight[below])]
    ordered += [request for request in at.get(id(None), ()) if request not in ordered]
    return ordered
