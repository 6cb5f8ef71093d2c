"""What could stand in a request's way for ever: pins, a blocked head that goes away, preemption that helps nobody."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.ipc.messages import Abort, PinTokens, UnpinCall, pack_i32
from tests.support.scheduler import Harness

WEEK_S = 7 * 24 * 3600.0


def with_pin(tmp_path: Path) -> Harness:
    """Half of a pool of 32 pages is pinned."""
    harness = Harness(tmp_path, num_pages=32, page_size=16, max_len=512, num_slots=4, step_tokens=256)
    harness.add(1, 240, max_tokens=1)
    harness.run()
    harness.inbox.messages.append(PinTokens(0, 1, pack_i32(range(3, 243)), WEEK_S, None))
    harness.turn()
    assert harness.cache.tree is not None
    assert harness.cache.tree.num_pins == 1
    return harness


def test_a_pin_gives_way_to_a_request_that_fits_no_other_way(tmp_path: Path) -> None:
    harness = with_pin(tmp_path)
    harness.add(2, list(range(500, 800)), max_tokens=4)
    harness.add(3, list(range(900, 910)), max_tokens=4)
    harness.run()
    assert set(harness.finish) == {1, 2, 3}
    assert harness.cache.tree is not None
    assert harness.cache.tree.num_pins == 0


def test_a_pin_gives_way_to_an_answer_that_grows(tmp_path: Path) -> None:
    harness = with_pin(tmp_path)
    harness.add(2, list(range(500, 600)), max_tokens=400)
    harness.run()
    assert len(harness.tokens[2]) == 400


def test_a_pin_stays_where_there_is_room(tmp_path: Path) -> None:
    harness = with_pin(tmp_path)
    for number in range(2, 8):
        harness.add(number, list(range(100 * number, 100 * number + 90)), max_tokens=20)
    harness.run()
    assert harness.cache.tree is not None
    assert harness.cache.tree.num_pins == 1


def test_who_waits_hears_of_a_pin_that_ended(tmp_path: Path) -> None:
    harness = with_pin(tmp_path)
    harness.add(2, list(range(800, 840)), max_tokens=150)
    harness.turn(3)
    harness.add(3, list(range(500, 760)), max_tokens=4)
    harness.turn(2)
    assert 3 in harness.planner.admission.waiting
    harness.inbox.messages.append(UnpinCall(0, 2, harness.front.messages[0].values["pin"]))
    harness.turn(4)
    assert 3 not in harness.planner.admission.waiting
    harness.run()


def test_the_next_one_moves_up_when_the_blocked_head_is_aborted(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=4, page_size=128, max_len=512, num_slots=4, step_tokens=256)
    harness.add(1, list(range(10, 20)), max_tokens=300)
    harness.turn(5)
    harness.add(2, list(range(100, 580)), max_tokens=4)
    harness.add(3, list(range(700, 710)), max_tokens=4)
    harness.turn(2)
    assert set(harness.planner.admission.waiting) == {2, 3}
    harness.inbox.messages.append(Abort(2, 0))
    harness.turn(8)
    assert 3 in harness.finish
    harness.run()


def test_nobody_is_preempted_for_a_request_that_waits_for_a_prefix(tmp_path: Path) -> None:
    harness = Harness(
        tmp_path, num_pages=400, page_size=16, max_len=4000, num_slots=2, step_tokens=32, policy="priority"
    )
    harness.add(2, list(range(900, 910)), max_tokens=200)
    harness.turn(6)
    shared = [3 + i % 800 for i in range(2000)]
    harness.add(1, shared, max_tokens=4, priority=20)
    harness.turn(3)
    harness.add(3, [*shared, 5, 6, 7], max_tokens=4, priority=20)
    harness.turn(30)
    assert harness.planner.num_retractions == 0
    harness.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("radix", [False, True])
def test_one_arrival_preempts_no_more_than_it_needs(tmp_path: Path, depth: int, radix: bool) -> None:
    harness = Harness(
        tmp_path, num_pages=64, page_size=16, max_len=1024, num_slots=16, step_tokens=1024, policy="priority",
        depth=depth, radix=radix,
    )  # fmt: skip
    for number in range(10):
        harness.add(number, [50 * number + 3 + i for i in range(80)], max_tokens=16, ignore_eos=True)
    harness.turn(6)
    harness.add(99, list(range(700, 780)), max_tokens=16, priority=50)
    harness.turn(3)
    assert harness.planner.num_retractions <= 1
    harness.run()


def test_nobody_is_preempted_if_it_would_not_suffice(tmp_path: Path) -> None:
    harness = Harness(
        tmp_path, num_pages=64, page_size=16, max_len=1024, num_slots=16, step_tokens=256, policy="priority"
    )
    harness.add(50, [3 + i for i in range(500)], max_tokens=300, priority=50)
    harness.turn(5)
    for number in range(4):
        harness.add(number, [10 * number + 600 + i for i in range(20)], max_tokens=100)
    harness.turn(10)
    harness.add(99, [500 - i for i in range(480)], max_tokens=500, priority=50)
    harness.turn(20)
    assert harness.planner.num_retractions == 0
    assert 99 in harness.planner.admission.waiting
    harness.run()


def test_depth_first_order_names_everybody_once_though_looking_splits_nodes(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=64, page_size=16, max_len=512, policy="dfs-weight")
    shared = list(range(3, 67))
    harness.add(1, shared, max_tokens=1)
    harness.run()
    # The first and the last end at the same node, which the second one's look-up cuts in two.
    harness.add(2, [*shared, 900, 901], max_tokens=6)
    harness.add(3, [*shared[:32], 902, 903], max_tokens=6)
    harness.add(4, [*shared, 904, 905], max_tokens=6)
    harness.run()
    assert not harness.errors
    assert set(harness.finish) == {1, 2, 3, 4}
    assert harness.slots.num_free == harness.slots.num_slots
