"""Matching, storing, locks and flush of the prefix tree, rule by rule."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.radix_tree import RadixTree
from tests.unit.cache.trees import FULL, Logged, keys, pages, window


def test_a_match_is_whole_pages_within_the_limit() -> None:
    log = Logged(page_size=4)
    log.insert(range(12), [7, 8, 9])
    for limit, expected in [(12, [7, 8, 9]), (11, [7, 8]), (4, [7]), (3, []), (0, []), (-1, []), (99, [7, 8, 9])]:
        got = log.match(range(12), limit)
        assert got.num_tokens == 4 * len(expected)
        assert got.pages[0].tolist() == expected
    assert log.match(range(14)).num_tokens == 12
    assert log.match(range(3)).num_tokens == 0
    assert log.match([]).num_tokens == 0


def test_a_match_may_end_inside_an_edge_and_splits_it() -> None:
    log = Logged(page_size=2)
    whole = log.insert(range(8), [0, 1, 2, 3])
    got = log.match([0, 1, 2, 3, 9, 9, 9, 9])
    assert (got.num_tokens, got.pages[0].tolist(), got.node.end) == (4, [0, 1], 4)
    assert log.tree.num_nodes == 2
    assert whole.node.end == 8
    assert whole.node.parent is got.node
    assert log.match(range(8)).node is whole.node


def test_a_difference_within_a_page_excludes_that_page() -> None:
    log = Logged(page_size=4)
    log.insert(range(16), range(4))
    for differing in range(16):
        asked = list(range(16))
        asked[differing] = 99
        assert log.match(asked).num_tokens == differing // 4 * 4


def test_insert_says_what_is_new_what_is_double_and_what_the_tree_has() -> None:
    log = Logged(page_size=2)
    first = log.insert(range(6), [0, 1, 2])
    assert (first.num_new_pages, first.duplicates[0].tolist(), first.pages[0].tolist()) == ((3,), [], [0, 1, 2])
    own = log.match(range(4))
    second = log.insert([0, 1, 2, 3, 8, 8, 9, 9], [*own.pages[0], 10, 11])
    assert (second.num_new_pages, second.duplicates[0].tolist(), second.pages[0].tolist()) == ((2,), [], [0, 1, 10, 11])
    third = log.insert([0, 1, 2, 3, 8, 8, 7, 7], [0, 21, 22, 23])
    assert (third.num_new_pages, third.duplicates[0].tolist(), third.pages[0].tolist()) == (
        (1,),
        [21, 22],
        [0, 1, 10, 23],
    )
    again = log.insert(range(6), [0, 1, 2])
    assert (again.num_new_pages, again.duplicates[0].tolist()) == ((0,), [])
    assert again.node is first.node
    assert sorted(log.tree.owned_pages(0).tolist()) == [0, 1, 2, 10, 11, 23]


def test_nothing_to_insert_changes_nothing() -> None:
    log = Logged(page_size=2)
    got = log.insert([], [])
    assert (got.num_new_pages, got.pages[0].tolist(), log.tree.num_nodes) == ((0,), [], 0)
    log.tree.unlock(log.tree.lock(got.node))
    assert log.tree.check() == []


def test_the_tree_keeps_copies() -> None:
    log = Logged()
    given_keys, given_pages = keys(range(4)), pages(range(4))
    log.tree.insert(b"", given_keys, [given_pages])
    given_keys[:] = 9
    given_pages[:] = 9
    got = log.match(range(4))
    assert got.pages[0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        got.pages[0][0] = 1


def test_broken_pages_and_missing_full_pages_are_our_own_mistakes() -> None:
    log = Logged(page_size=2)
    with pytest.raises(AssertionError, match="broken page"):
        log.insert(range(3), [0])
    with pytest.raises(AssertionError, match="lacks pages"):
        log.insert(range(4), [0, -1])
    with pytest.raises(AssertionError, match="disagree"):
        log.insert(range(4), [0])
    assert log.tree.check() == []
    assert log.tree.num_nodes == 0


def test_namespaces_share_nothing_and_leave_no_trace() -> None:
    log = Logged()
    log.insert(range(4), range(4), name=b"a")
    assert log.match(range(4), name=b"b").num_tokens == 0
    assert log.insert(range(4), range(10, 14), name=b"b").num_new_pages == (4,)
    assert log.evict(0, 4) == [(0, [0, 1, 2, 3], 0)]
    assert log.match(range(4), name=b"a").num_tokens == 0
    assert log.match(range(4), name=b"b").pages[0].tolist() == [10, 11, 12, 13]
    assert list(log.tree._roots) == [b"b"]


def test_locks_keep_the_path_to_the_root() -> None:
    log = Logged()
    log.insert(range(4), range(4))
    log.insert([0, 1, 8, 8], [0, 1, 18, 19])
    lock = log.tree.lock(log.match(range(4)).node)
    assert (log.tree.num_pages(0), log.tree.num_locked(0), log.tree.evictable(0)) == (6, 4, 2)
    assert log.evict(0, 99) == [(0, [18, 19], 0)]
    second = log.tree.lock(log.match(range(2)).node)
    log.tree.unlock(lock)
    assert log.evict(0, 99) == [(0, [2, 3], 0)]
    log.tree.unlock(second)
    assert log.evict(0, 99) == [(0, [0, 1], 0)]
    assert log.tree.num_nodes == 0


def test_unlocking_twice_raises() -> None:
    log = Logged()
    lock = log.tree.lock(log.insert(range(2), range(2)).node)
    log.tree.unlock(lock)
    with pytest.raises(RuntimeError, match="twice"):
        log.tree.unlock(lock)
    assert log.tree.check() == []


def test_a_removed_node_cannot_be_locked() -> None:
    log = Logged()
    node = log.insert(range(2), range(2)).node
    log.evict(0, 2)
    with pytest.raises(AssertionError, match="no longer there"):
        log.tree.lock(node)


def test_locks_survive_splits() -> None:
    log = Logged()
    node = log.insert(range(8), range(8)).node
    lock = log.tree.lock(node)
    log.match(range(3))
    log.insert([0, 1, 2, 3, 4, 50], range(50, 56))
    assert log.tree.num_locked(0) == 8
    assert log.evict(0, 99) == [(0, [55], 0)]
    log.tree.unlock(lock)
    assert log.tree.num_locked(0) == 0
    assert len(log.evict(0, 99)) == 3


def test_pages_remember_the_last_step_that_may_read_them() -> None:
    log = Logged()
    node = log.insert(range(4), range(4)).node
    first, second = log.tree.lock(node), log.tree.lock(node)
    log.tree.unlock(second, busy_until=9)
    log.tree.unlock(first, busy_until=5)
    upper = log.match(range(2)).node
    log.tree.unlock(log.tree.lock(upper), busy_until=11)
    assert log.evict(0, 99) == [(0, [2, 3], 9), (0, [0, 1], 11)]


def test_a_window_needs_only_its_end() -> None:
    log = Logged([FULL, window(2)])
    got = log.insert(range(6), range(6), [-1, -1, -1, 13, 14, 15])
    assert got.num_new_pages == (6, 3)
    assert log.tree.num_nodes == 2
    assert log.match(range(4)).num_tokens == 0  # ends one token behind the hole
    found = log.match(range(5))
    assert found.num_tokens == 5
    assert found.pages[1].tolist() == [-1, -1, -1, 13, 14]
    # Page 13 is there, but a lock would not keep it.
    assert log.match(range(6)).pages[1].tolist() == [-1, -1, -1, -1, 14, 15]
    assert log.match(range(3)).num_tokens == 0


def test_a_prefix_shorter_than_the_window_must_be_whole() -> None:
    log = Logged([FULL, window(10)])
    log.insert(range(4), range(4), range(4))
    assert log.match(range(4)).num_tokens == 4
    log.insert([5, 6, 7], range(10, 13), [-1, 11, 12])
    assert log.match([5, 6, 7]).num_tokens == 0


def test_every_group_must_agree() -> None:
    log = Logged([CacheGroup("a", "window", 1), FULL, CacheGroup("b", "window", 3)])
    log.insert(range(6), [0, 1, 2, 3, -1, 5], range(6), [-1, 1, 2, 3, 4, -1])
    # a allows 1-4 and 6; b (its first page is missing) allows 4 and 5.
    assert log.match(range(6)).num_tokens == 4


def test_tombstones_adopt_what_a_caller_brings() -> None:
    log = Logged([FULL, window(2)])
    log.insert(range(4), range(4), range(4))
    assert log.evict(1, 99) == [(1, [0, 1, 2, 3], 0)]
    assert log.match(range(4)).num_tokens == 0
    got = log.insert(range(4), range(10, 14), [-1, -1, 12, 13])
    assert got.num_new_pages == (0, 2)
    assert [ids.tolist() for ids in got.duplicates] == [[10, 11, 12, 13], []]
    assert log.tree.num_nodes == 2
    found = log.match(range(4))
    assert [ids.tolist() for ids in found.pages] == [[0, 1, 2, 3], [-1, -1, 12, 13]]
    assert (log.tree.num_pages(0), log.tree.num_pages(1)) == (4, 2)


def test_window_locks_keep_the_last_window_only() -> None:
    log = Logged([FULL, window(3)])
    log.insert(range(8), range(8), range(8))
    lock = log.tree.lock(log.match(range(8)).node)
    # Nodes are locked whole, until a split shows that the upper part is not needed.
    assert (log.tree.num_locked(0), log.tree.num_locked(1)) == (8, 8)
    log.match(range(4))
    assert (log.tree.num_locked(0), log.tree.num_locked(1)) == (8, 4)
    log.match(range(6))
    assert log.tree.num_locked(1) == 4
    assert log.evict(1, 99) == [(1, [0, 1, 2, 3], 0)]
    assert log.match(range(8)).num_tokens == 8
    log.tree.unlock(lock, 3)
    assert log.evict(1, 99) == [(1, [4, 5], 3), (1, [6, 7], 3)]


def test_flush_spares_only_what_is_locked() -> None:
    log = Logged([FULL, window(2)])
    log.insert(range(8), range(8), range(8))
    log.insert([9, 9], [8, 9], [8, 9], name=b"other")
    log.match(range(3))
    log.tree.pin(b"other", keys([9, 9]), 60)
    lock = log.tree.lock(log.match(range(6)).node)
    assert log.tree.flush() == 4
    assert log.tree.check() == []
    assert (log.tree.num_pins, log.tree.num_pages(0), log.tree.num_pages(1)) == (0, 6, 3)
    assert log.match(range(8)).num_tokens == 6
    log.tree.unlock(lock)
    assert log.tree.flush() == 6
    assert (log.tree.num_nodes, log.tree.num_pages(1)) == (0, 0)


def test_groups_and_sizes_are_checked() -> None:
    for group in [("x", "window", 0), ("x", "full", 4)]:
        with pytest.raises(ValueError, match="cache group x"):
            CacheGroup(*group)
    with pytest.raises(ValueError, match="full attention"):
        RadixTree([window(4)], 1, on_evict=lambda group, ids, busy: None)
    with pytest.raises(ValueError, match="page size"):
        RadixTree([FULL], 0, on_evict=lambda group, ids, busy: None)


def test_check_sees_what_is_wrong() -> None:
    log = Logged([FULL, window(2)])
    node = log.insert(range(4), range(4), range(4)).node
    lock = log.tree.lock(node)
    node.locks = [2, 1, 0, 0]
    assert any("locks" in line for line in log.tree.check())
    node.locks = [1, 1, 0, 0]
    node.pages = (node.pages[0], np.array([0, 1, 2, 2], np.int32).tobytes())
    assert any("twice" in line for line in log.tree.check())
    node.pages = (node.pages[0], None)
    assert any("counted" in line for line in log.tree.check())
    node.pages = (node.pages[0], np.array(range(4), np.int32).tobytes())
    assert log.tree.check() == []
    log.tree.unlock(lock)
    node.queued = 0
    assert any("mark" in line for line in log.tree.check())


def branching() -> Logged:
    """0 1 2 3 on the trunk, 4 5 and 6 7 on two branches, 20 21 apart; pages as the keys."""
    log = Logged([FULL, window(2)])
    for tokens in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [20, 21]):
        log.insert(tokens, tokens, tokens)
    return log


def test_nobody_finds_what_is_detached_nor_what_hangs_below() -> None:
    log = branching()
    log.tree.detach(log.match([0, 1, 2, 3, 4, 5]).node)
    assert sorted(page for group, ids, _ in log.evicted if group == 0 for page in ids) == list(range(8))
    for tokens in ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [0]):
        assert log.match(tokens).num_tokens == 0
    assert log.match([20, 21]).num_tokens == 2
    assert (log.tree.num_nodes, log.tree.num_pages(0)) == (1, 2)
    assert log.tree.check() == []


def test_what_is_detached_lives_as_long_as_its_locks() -> None:
    log = branching()
    node = log.match([0, 1, 2, 3, 4, 5]).node
    other = log.match([0, 1, 2, 3, 6, 7]).node
    lock, second = log.tree.lock(other), log.tree.lock(other)
    log.tree.detach(node)
    assert log.evicted == [(0, [4, 5], 0), (1, [4, 5], 0)]
    assert log.match([0, 1, 2, 3, 6, 7]).num_tokens == 0
    assert log.tree.check() == []
    # The same keys again: another place in the tree, other pages.
    log.insert([0, 1, 2, 3, 6, 7], range(30, 36), range(30, 36))
    assert log.match([0, 1, 2, 3, 6, 7]).pages[0].tolist() == list(range(30, 36))
    assert (log.tree.num_pages(0), log.tree.num_locked(0), log.tree.evictable(0)) == (14, 6, 8)
    log.tree.detach(other)
    assert log.match([0, 1, 2, 3, 6, 7]).num_tokens == 6
    log.tree.unlock(lock, 5)
    log.evicted.clear()
    log.tree.unlock(second, 7)
    assert sorted((group, ids, busy) for group, ids, busy in log.evicted if group == 0) == [
        (0, [0, 1, 2, 3], 7),
        (0, [6, 7], 7),
    ]
    assert log.match([0, 1, 2, 3, 6, 7]).num_tokens == 6
    assert log.tree.check() == []


def test_a_window_group_lets_go_of_detached_pages_too() -> None:
    log = branching()
    lock = log.tree.lock(log.match([0, 1, 2, 3, 6, 7]).node)
    log.tree.detach(log.match([0, 1, 2, 3]).node)
    assert log.evict(1, 99) == [(1, [20, 21], 0), (1, [0, 1, 2, 3], 0)]
    log.tree.unlock(lock)
    assert log.tree.check() == []
    assert log.tree.num_pages(1) == 0


def test_a_flush_leaves_what_is_detached_to_its_locks() -> None:
    log = branching()
    lock = log.tree.lock(log.match([0, 1, 2, 3, 6, 7]).node)
    log.tree.detach(log.match([0, 1, 2, 3]).node)
    assert log.tree.flush() == 2
    assert log.tree.num_pages(0) == 6
    log.tree.unlock(lock)
    assert log.tree.num_nodes == 0
    assert log.tree.check() == []


def test_a_look_up_says_what_a_match_would_find_and_changes_nothing() -> None:
    log = branching()
    before, version = log.tree.num_nodes, log.tree.version
    assert log.tree.look_up(b"", keys([0, 1, 9]), 3)[0] == 2
    assert log.tree.look_up(b"", keys([0, 1, 2, 3, 4, 5]), 5)[0] == 5
    assert log.tree.look_up(b"", keys([9]), 1)[0] == 0
    assert (log.tree.num_nodes, log.tree.version) == (before, version)
    log.match([0, 1, 9])
    assert (log.tree.num_nodes, log.tree.version) == (before + 1, version)
    log.evict(0, 1)
    assert log.tree.version > version
