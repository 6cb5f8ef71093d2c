"""Which nodes go first, and that finding them does not depend on how many there are."""

from __future__ import annotations

import pytest

from scheduler_proc.cache.eviction import SMALL_HEAP
from tests.unit.cache.trees import FULL, Logged, keys, window


def firsts(log: Logged, group: int = 0) -> list[int]:
    """First page of each node in the order in which they go."""
    return [ids[0] for index, ids, _ in log.evict(group, 1 << 30) if index == group]


def test_lru_by_match_and_insert() -> None:
    log = Logged()
    for number in range(4):
        log.insert([number], [number])
    log.match([0])
    log.insert([1], [99])
    assert firsts(log) == [2, 3, 0, 1]


def test_lfu_by_hits_then_access() -> None:
    log = Logged(policy="lfu")
    for number in range(4):
        log.insert([number], [number])
    for number in (0, 0, 1, 3, 2):
        log.match([number])
    assert firsts(log) == [1, 3, 2, 0]


def test_fifo_by_creation() -> None:
    log = Logged(policy="fifo")
    for number in range(3):
        log.insert([number], [number])
    log.match([0])
    assert firsts(log) == [0, 1, 2]


def test_priority_then_access() -> None:
    log = Logged(policy="priority")
    for number, priority in enumerate([1, 0, 0, -1]):
        log.insert([number], [number], priority=priority)
    log.match([1])
    log.insert([3], [3], priority=2)
    assert firsts(log) == [2, 1, 0, 3]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="known are lru"):
        Logged(policy="mru")  # ty: ignore[invalid-argument-type]


def test_leaves_before_parents_and_only_as_many_as_needed() -> None:
    log = Logged()
    log.insert(range(4), range(4))
    log.insert([0, 1, 8, 9], [0, 1, 18, 19])
    log.match(range(4))
    assert log.evict(0, 1) == [(0, [18, 19], 0)]
    assert log.evict(0, 3) == [(0, [2, 3], 0), (0, [0, 1], 0)]
    assert log.evict(0, 1) == []


def test_a_leaf_takes_the_pages_of_all_groups_along() -> None:
    log = Logged([FULL, window(4)])
    log.insert(range(2), [0, 1], [10, 11])
    assert log.evict(0, 1) == [(0, [0, 1], 0), (1, [10, 11], 0)]


def test_window_pages_go_from_the_root_down_and_leave_the_full_ones() -> None:
    log = Logged([FULL, window(2)])
    for end in (2, 4, 6):
        log.insert(range(end), range(end), range(end))
    log.insert([9], [9], [9])
    log.match(range(6))
    assert log.evict(1, 5) == [(1, [9], 0), (1, [0, 1], 0), (1, [2, 3], 0)]
    assert log.match(range(6)).num_tokens == 6
    assert (log.tree.num_pages(0), log.tree.num_pages(1)) == (7, 2)


def wide(num_leaves: int) -> Logged:
    """Leaves below a shared first page; checked by nobody, as that looks at all nodes."""
    log = Logged([FULL, window(1)])
    for number in range(num_leaves):
        ids = [0, number + 1]
        log.tree.insert(b"", keys([0, number + 1]), [keys(ids).astype("int32")] * 2)
    return log


@pytest.mark.parametrize("group", [0, 1])
def test_cost_does_not_grow_with_the_tree(group: int) -> None:
    costs = []
    for num_leaves in (100, 10_000):
        log = wide(num_leaves)
        before = log.tree.num_heap_operations
        assert log.tree.evict(group, 50) == 50
        costs.append(log.tree.num_heap_operations - before)
    assert costs[1] <= costs[0] <= 3 * 50


def test_a_touch_costs_an_eviction_at_most_one_move() -> None:
    log = wide(1000)
    for number in range(300):
        log.tree.match(b"", keys([0, number % 100 + 1]), 2)
    before = log.tree.num_heap_operations
    assert log.tree.evict(0, 10) == 10
    # 100 leaves were touched, each more than once; their entries move once.
    assert log.tree.num_heap_operations - before <= 100 + 2 * 10


def test_matching_and_locking_do_not_work_on_heaps() -> None:
    log = wide(100)
    before = log.tree.num_heap_operations
    for number in range(100):
        lock = log.tree.lock(log.tree.match(b"", keys([0, number + 1]), 2).node)
        log.tree.unlock(lock)
    assert log.tree.num_heap_operations == before


def test_heaps_do_not_fill_with_what_is_gone() -> None:
    log = Logged([FULL, window(1)])
    for number in range(3000):
        log.tree.insert(b"", keys([number]), [keys([number]).astype("int32")] * 2)
        if number >= 20:
            log.tree.evict(0, 1)
    assert log.tree.num_nodes == 20
    assert log.tree.num_heap_entries <= 2 * (2 * 20 + SMALL_HEAP)
    assert log.tree.check() == []


def test_heaps_do_not_fill_with_what_is_detached() -> None:
    log = Logged([FULL, window(1)])
    for number in range(1000):
        log.tree.insert(b"", keys([number]), [keys([number]).astype("int32")] * 2)
    held = [log.tree.lock(log.tree.match(b"", keys([number]), 1).node) for number in range(10)]
    for number in range(900):
        log.tree.detach(log.tree.match(b"", keys([number]), 1).node)
    assert log.tree.check() == []
    for lock in held:
        log.tree.unlock(lock)
    for number in range(900, 1000):
        log.tree.detach(log.tree.match(b"", keys([number]), 1).node)
    assert log.tree.num_nodes == 0
    assert log.tree.num_heap_entries <= 2 * SMALL_HEAP
    assert log.tree.check() == []
