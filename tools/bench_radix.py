"""Prefix cache cost by tree size: microseconds per match, insert and evicted node, and bytes per node.

    PYTHONPATH=. python tools/bench_radix.py --nodes 1000 1000000 --window 128 --json out.json

The tree: shared prefixes of 4 pages, each with many continuations of 2 pages. Garbage collection is off while a tree
is built and timed: a collection's cost belongs to the process (which freezes what lives long), not to the tree.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from scheduler_proc.cache.eviction import Policy
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.radix_tree import RadixTree

PREFIX_PAGES = 4
TAIL_PAGES = 2
NAMESPACE = b"bench"


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Workload:
    """Sequences that share prefixes: sequence i continues prefix i % num_prefixes with keys of its own."""

    def __init__(self, num_nodes: int, page_size: int, num_groups: int) -> None:
        self.num_prefixes = max(1, int(num_nodes**0.5) // 2)
        self.page_size = page_size
        self.num_groups = num_groups
        rng = np.random.default_rng(0)
        self.prefixes = rng.integers(0, 1 << 17, (self.num_prefixes, PREFIX_PAGES * page_size), dtype=np.int64)
        self.num_pages = 0

    def keys(self, number: int) -> np.ndarray:
        """int64 [(PREFIX_PAGES + TAIL_PAGES) * page_size]."""
        tail = np.arange(TAIL_PAGES * self.page_size, dtype=np.int64) + (1 << 20) + number * 1024
        return np.concatenate([self.prefixes[number % self.num_prefixes], tail])

    def pages(self) -> list[np.ndarray]:
        """Fresh pages for one sequence, per group."""
        num = PREFIX_PAGES + TAIL_PAGES
        first, self.num_pages = self.num_pages, self.num_pages + num
        return [np.arange(first, first + num, dtype=np.int32)] * self.num_groups


def median_us(times: list[float]) -> float:
    return round(statistics.median(times) * 1e6, 2)


def timed(calls: int, action: Callable[[int], object]) -> list[float]:
    """Seconds of each call."""
    times = []
    for number in range(calls):
        start = time.perf_counter()
        action(number)
        times.append(time.perf_counter() - start)
    return times


def measure(num_nodes: int, page_size: int, window: int, policy: Policy, calls: int) -> dict[str, float | int | str]:
    """One row of the table."""
    # Few enough that a small tree stays small, and that most of its nodes are not the ones just touched.
    calls = min(calls, num_nodes // 4)
    groups = [CacheGroup("full", "full")]
    if window:
        groups.append(CacheGroup("window", "window", window))
    work = Workload(num_nodes, page_size, len(groups))
    tree = RadixTree(groups, page_size, policy=policy, on_evict=lambda group, pages, busy_until: None)
    gc.collect()
    before = resident_bytes()
    start = time.perf_counter()
    number = 0
    while tree.num_nodes < num_nodes:
        tree.insert(NAMESPACE, work.keys(number), work.pages())
        number += 1
    build_s = time.perf_counter() - start
    size = resident_bytes() - before

    order = np.random.default_rng(1).permutation(number)[:calls]
    asked = [work.keys(int(i)) for i in order]
    length = len(asked[0])
    matches = timed(len(asked), lambda i: tree.match(NAMESPACE, asked[i], length))
    known = [tree.match(NAMESPACE, keys, length) for keys in asked]
    # What a caller got from a match it may pass on again, except what a window hides.
    present = timed(len(asked), lambda i: tree.insert(NAMESPACE, asked[i], known[i].pages))
    locks = timed(len(asked), lambda i: tree.unlock(tree.lock(known[i].node), i))
    fresh = [(work.keys(number + i), work.pages()) for i in range(calls)]
    new = timed(calls, lambda i: tree.insert(NAMESPACE, *fresh[i]))

    def evict_some(group: int) -> tuple[float, float, float]:
        operations = tree.num_heap_operations
        times = timed(calls, lambda _: tree.evict(group, 1))
        return median_us(times), round(max(times) * 1e6, 1), round((tree.num_heap_operations - operations) / calls, 2)

    row: dict[str, float | int | str] = {
        "nodes": tree.num_nodes,
        "policy": policy,
        "groups": len(groups),
        "build_s": round(build_s, 2),
        "bytes_per_node": round(size / num_nodes),
        "match_us": median_us(matches),
        "insert_present_us": median_us(present),
        "insert_new_us": median_us(new),
        "lock_unlock_us": median_us(locks),
    }
    row["evict_us"], row["evict_max_us"], row["heap_operations_per_evicted"] = evict_some(0)
    if window:
        row["evict_window_us"], _, _ = evict_some(1)
    start = time.perf_counter()
    num_left = tree.num_nodes
    tree.evict(0, tree.evictable(0))
    row["evict_all_us_per_node"] = round((time.perf_counter() - start) / num_left * 1e6, 2)
    return row


def long_edge(page_size: int, num_tokens: int, calls: int) -> dict[str, float]:
    """One edge of many tokens: a match, and an insert of what is there, with the tree's pages and with others."""
    tree = RadixTree([CacheGroup("full", "full")], page_size, on_evict=lambda group, pages, busy_until: None)
    keys = np.arange(num_tokens // page_size * page_size, dtype=np.int64)
    pages = np.arange(num_tokens // page_size, dtype=np.int32)
    others = pages + len(pages)
    tree.insert(NAMESPACE, keys, [pages])
    return {
        "tokens": len(keys),
        "match_us": median_us(timed(calls, lambda _: tree.match(NAMESPACE, keys, num_tokens))),
        "insert_same_us": median_us(timed(calls, lambda _: tree.insert(NAMESPACE, keys, [pages]))),
        "insert_duplicate_us": median_us(timed(calls, lambda _: tree.insert(NAMESPACE, keys, [others]))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--window", type=int, default=0, help="tokens; 0 = no window group")
    parser.add_argument("--policy", choices=["lru", "lfu", "fifo", "priority"], default="lru")
    parser.add_argument("--calls", type=int, default=2000, help="timed calls of each kind, at most nodes / 4")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    gc.disable()
    rows: list[dict[str, float | int | str]] = []
    for num_nodes in args.nodes:
        row = measure(num_nodes, args.page_size, args.window, args.policy, args.calls)
        rows.append(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        gc.collect()
    edges = [long_edge(args.page_size, num_tokens, args.calls) for num_tokens in (1024, 16384)]
    for edge in edges:
        print("one edge:", " ".join(f"{name}={value}" for name, value in edge.items()))
    if args.json:
        args.json.write_text(json.dumps({"python": sys.version, "trees": rows, "edges": edges}, indent=1) + "\n")


if __name__ == "__main__":
    main()
