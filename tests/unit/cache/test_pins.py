"""Pins: kept for a time, counted once, bounded."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequestError
from scheduler_proc.cache import pins
from scheduler_proc.cache.groups import Node
from tests.unit.cache.trees import FULL, Logged, keys, window


def test_a_pin_keeps_what_is_cached_until_its_time_is_over() -> None:
    log = Logged(page_size=2)
    log.insert(range(6), range(3))
    pin_id, kept = log.tree.pin(b"", keys(range(9)), 10.0)
    assert kept == 6
    assert log.evict(0, 99) == []
    log.now = 9.9
    assert log.tree.expire_pins() == 0
    log.now = 10.0
    assert log.tree.expire_pins() == 1
    assert log.evict(0, 99) == [(0, [0, 1, 2], 0)]
    assert not log.tree.unpin(pin_id)


def test_unpin_ends_a_pin_once() -> None:
    log = Logged()
    log.insert(range(4), range(4))
    first, _ = log.tree.pin(b"", keys(range(4)), 10)
    second, _ = log.tree.pin(b"", keys(range(2)), 20)
    assert first != second
    assert log.tree.unpin(first)
    assert not log.tree.unpin(first)
    assert log.evict(0, 99) == [(0, [2, 3], 0)]
    log.now = 15
    assert log.tree.expire_pins() == 0
    assert log.tree.num_pins == 1


def test_nothing_cached_means_no_pin() -> None:
    log = Logged(page_size=4)
    log.insert(range(4), [0])
    assert log.tree.pin(b"", keys([7] * 4), 10) == (0, 0)
    assert log.tree.pin(b"other", keys(range(4)), 10) == (0, 0)
    assert log.tree.pin(b"", keys([]), 10) == (0, 0)
    assert not log.tree.unpin(0)
    assert log.tree.num_live_locks == 0


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan")])
def test_a_pin_without_duration_is_refused(ttl_s: float) -> None:
    log = Logged()
    log.insert(range(4), range(4))
    with pytest.raises(InvalidRequestError, match="longer than 0") as caught:
        log.tree.pin(b"", keys(range(4)), ttl_s)
    assert caught.value.param == "ttl_s"


def test_the_pinned_share_is_bounded_and_shared_pages_count_once() -> None:
    log = Logged([FULL, window(1)], max_pinned_pages=[6, 99])
    log.insert(range(4), range(4), range(4))
    log.insert([0, 1, 2, 7], [0, 1, 2, 17], [0, 1, 2, 17])
    log.insert([8, 9], [18, 19], [18, 19])
    log.tree.pin(b"", keys(range(4)), 10)
    log.tree.pin(b"", keys([0, 1, 2, 7]), 10)
    log.tree.pin(b"", keys(range(4)), 10)
    with pytest.raises(InvalidRequestError, match=r"7 pages of the full cache .* at most 6") as caught:
        log.tree.pin(b"", keys([8, 9]), 10)
    assert caught.value.status == 400
    assert log.tree.check() == []
    assert (log.tree.num_pins, log.tree.num_locked(0)) == (3, 5)
    assert log.tree.pin(b"", keys([8]), 10)[1] == 1


def test_ended_pins_do_not_gather() -> None:
    log = Logged()
    log.insert(range(4), range(4))
    for _ in range(1000):
        assert log.tree.unpin(log.tree.pin(b"", keys(range(4)), 1e6)[0])
    assert len(log.tree._pins._ends) <= 64
    assert log.tree.check() == []


def test_only_so_many_pins_live_at_a_time() -> None:
    log = Logged()
    log.insert(range(4), range(4))
    for _ in range(pins.MOST_PINS):
        log.tree.pin(b"", keys(range(4)), 10)
    with pytest.raises(
        InvalidRequestError, match=rf"{pins.MOST_PINS} pins, and no more than {pins.MOST_PINS}"
    ) as caught:
        log.tree.pin(b"", keys(range(4)), 10)
    assert (caught.value.status, caught.value.code) == (400, "pin_limit_exceeded")
    log.now = 10
    assert log.tree.expire_pins() == pins.MOST_PINS
    assert log.tree.pin(b"", keys(range(4)), 10)[1] == 4
    assert log.tree.check() == []


def test_one_more_pin_looks_at_its_own_path_only(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Logged([FULL, window(3)], max_pinned_pages=[1 << 20, 1 << 20])
    for number in range(200):
        tokens = [*range(4), number + 10]
        log.tree.insert(b"", keys(tokens), [keys(tokens).astype("int32")] * 2)
    looked_at = 0
    held_pages = pins.held_pages

    def counting(node: Node, group: int) -> int:
        nonlocal looked_at
        looked_at += 1
        return held_pages(node, group)

    costs = []
    monkeypatch.setattr(pins, "held_pages", counting)
    for number in range(200):
        before = looked_at
        log.tree.pin(b"", keys([*range(4), number + 10]), 10)
        costs.append(looked_at - before)
    monkeypatch.undo()
    assert costs[-1] <= costs[1] <= 8
    assert log.tree.check() == []


def test_pins_and_locks_are_counted_apart() -> None:
    log = Logged([FULL, window(2)], max_pinned_pages=[4, 4])
    log.insert(range(8), range(8), range(8))
    lock = log.tree.lock(log.match(range(8)).node)
    log.tree.pin(b"", keys(range(4)), 10)
    log.match(range(2))
    log.match(range(3))
    assert (log.tree._locks.num_pinned(0), log.tree._locks.num_pinned(1)) == (4, 2)
    with pytest.raises(InvalidRequestError, match="5 pages of the full cache"):
        log.tree.pin(b"", keys(range(5)), 10)
    log.tree.unlock(lock)
    assert (log.tree.num_locked(0), log.tree.num_locked(1)) == (4, 2)
    log.now = 10
    log.tree.expire_pins()
    assert (log.tree._locks.num_pinned(0), log.tree._locks.num_pinned(1)) == (0, 0)
    assert log.tree.check() == []
