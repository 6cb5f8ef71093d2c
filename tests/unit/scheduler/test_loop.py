"""The scheduler loop on the null device: order, ends, aborts, retraction, held ends, faults, pages."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import Abort, Finish, Resend, StatsCall, Stop
from tests.support.scheduler import Harness, expected_null_tokens, pages_kept

DEPTHS = [0, 1, 2]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("step_tokens", [1, 7, 64])
@pytest.mark.parametrize("page_size", [1, 16])
def test_every_request_gets_its_own_tokens(tmp_path: Path, depth: int, step_tokens: int, page_size: int) -> None:
    harness = Harness(
        tmp_path, depth=depth, step_tokens=step_tokens, page_size=page_size, num_pages=1024 // page_size, num_slots=5
    )
    lengths = {number: (3 + 11 * number % 40, 1 + 7 * number % 30) for number in range(1, 13)}
    for number, (prompt, output) in lengths.items():
        harness.add(number, prompt, max_tokens=output)
    harness.run()
    for number, (prompt, output) in lengths.items():
        assert harness.tokens[number] == expected_null_tokens(prompt, output)
        assert harness.finish[number] is Finish.LENGTH
    assert pages_kept(harness)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_crowd_larger_than_the_pool_finishes_through_retraction(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth, num_pages=20, num_slots=16, max_len=320)
    for number in range(1, 17):
        harness.add(number, 20, max_tokens=200)
    harness.run()
    assert harness.planner.num_retractions > 0
    for number in range(1, 17):
        assert harness.tokens[number] == expected_null_tokens(20, 200)


@pytest.mark.parametrize("depth", DEPTHS)
def test_random_aborts_leave_no_page_behind(tmp_path: Path, depth: int) -> None:
    rng = random.Random(depth)
    harness = Harness(tmp_path, depth=depth, num_pages=40, num_slots=6, step_tokens=16)
    alive: list[int] = []
    for number in range(1, 120):
        harness.add(number, rng.randint(1, 90), max_tokens=rng.randint(1, 40), stop=("x",) if number % 3 == 0 else ())
        alive.append(number)
        for _ in range(rng.randint(0, 4)):
            harness.turn()
            assert harness.workload.audit() == []
        if rng.random() < 0.5:
            harness.inbox.messages.append(Abort(rng.choice(alive), 0))
    harness.run()
    assert pages_kept(harness)
    assert set(harness.finish) == set(alive)
    assert set(harness.finish.values()) == {Finish.ABORT, Finish.LENGTH}


def test_abort_frees_pages_within_two_steps(tmp_path: Path) -> None:
    harness = Harness(tmp_path, depth=2)
    harness.add(1, 30, max_tokens=100)
    harness.turn(6)
    step = harness.planner.step
    harness.inbox.messages.append(Abort(1, 0))
    harness.run()
    assert harness.finish[1] is Finish.ABORT
    assert harness.planner.step - step <= 2


def test_abort_of_another_attempt_is_ignored(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 5, attempt=1, max_tokens=3)
    harness.inbox.messages.append(Abort(1, 0))
    harness.run()
    assert harness.finish[1] is Finish.LENGTH


def test_end_of_sequence_and_stop_ids_end_a_request(tmp_path: Path) -> None:
    tokens = expected_null_tokens(5, 20)
    harness = Harness(tmp_path, eos_ids=(tokens[6],))
    harness.add(1, 5, max_tokens=20, ignore_eos=False)
    harness.add(2, 5, max_tokens=20, stop_token_ids=(tokens[3],))
    harness.add(3, 5, max_tokens=20)
    harness.run()
    assert harness.tokens[1] == tokens[:7]
    assert harness.finish[1] is Finish.STOP_TOKEN
    assert harness.tokens[2] == tokens[:4]
    assert harness.finish[2] is Finish.STOP_TOKEN
    assert harness.tokens[3] == tokens


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_held_end_keeps_its_slot_until_the_detokenizer_confirms(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth, confirm_holds=False)
    harness.add(1, 5, max_tokens=4, stop=("never",))
    harness.turn(12)
    assert harness.finish[1] is Finish.LENGTH
    assert harness.slots.num_used == 1
    harness.inbox.messages.append(Stop(1, 0, 4))
    harness.run()
    assert harness.slots.num_used == 0


def test_a_stop_from_the_detokenizer_ends_a_running_request(tmp_path: Path) -> None:
    harness = Harness(tmp_path, depth=1)
    harness.add(1, 5, max_tokens=100, stop=("x",))
    harness.turn(8)
    harness.inbox.messages.append(Stop(1, 0, 3))
    harness.run()
    assert 1 not in harness.workload.requests


def test_resumed_output_counts_as_output(tmp_path: Path) -> None:
    whole = expected_null_tokens(5, 20)
    harness = Harness(tmp_path)
    harness.tokens[1] = whole[:8]
    harness.add(1, 5, attempt=1, output=tuple(whole[:8]), max_tokens=20)
    harness.add(2, 5, attempt=1, output=tuple(whole[:8]), max_tokens=8)
    harness.run()
    assert harness.tokens[1] == whole
    assert harness.finish[2] is Finish.LENGTH
    assert harness.tokens[2] == []


def test_resend_repeats_from_an_index(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 5, max_tokens=10)
    harness.turn(5)
    seen = list(harness.tokens[1])
    harness.inbox.messages.append(Resend(1, 0, 2))
    harness.tokens[1] = seen[:2]
    harness.run()
    assert harness.tokens[1] == expected_null_tokens(5, 10)


def test_what_cannot_fit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=4, max_len=256)
    harness.add(1, 64, max_tokens=1)
    harness.add(2, 10, max_tokens=60)
    harness.add(3, 0, max_tokens=1)
    harness.add(4, [5, 10_000], max_tokens=1)
    harness.add(5, 10, max_tokens=5)
    harness.run()
    assert "64" in harness.errors[1].message
    assert harness.errors[1].status == 400
    assert "70" in harness.errors[2].message
    assert "64" in harness.errors[2].message
    assert harness.errors[3].status == 400
    assert harness.errors[4].status == 400
    assert harness.finish[5] is Finish.LENGTH


def test_decode_goes_on_while_a_long_prompt_prefills(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=8, max_len=512, num_pages=64)
    harness.add(1, 4, max_tokens=60)
    harness.turn(3)
    harness.add(2, 300, max_tokens=2)
    before = len(harness.tokens[1])
    harness.turn(20)
    assert len(harness.tokens[1]) - before >= 19
    harness.run()
    assert harness.tokens[2] == expected_null_tokens(300, 2)


def test_a_full_step_of_decoders_still_lets_a_prompt_in(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=4, num_slots=16, num_pages=128, max_len=256)
    for number in range(1, 9):
        harness.add(number, 4, max_tokens=150)
    harness.turn(30)
    harness.add(20, 20, max_tokens=2)
    harness.turn(40)
    assert harness.finish.get(20) is Finish.LENGTH
    harness.run()


def test_stats_pages_add_up(tmp_path: Path) -> None:
    harness = Harness(tmp_path, depth=2)
    for number in range(1, 5):
        harness.add(number, 40, max_tokens=30)
    harness.turn(4)
    harness.inbox.messages.append(Abort(2, 0))
    harness.inbox.messages.append(StatsCall(0, 7))
    harness.turn()
    stats = harness.front.messages[-1]
    assert stats.call == 7
    assert stats.running == 3
    parts = stats.pages_free + stats.pages_tree + stats.pages_tail + stats.pages_in_flight
    assert parts == stats.pages_total
    assert stats.pages_in_flight > 0
    harness.run()


def test_prompts_of_one_length_end_one_after_the_other(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=64, num_pages=256)
    for number in range(6):
        harness.add(number, [3 + 50 * number + i for i in range(24)], max_tokens=20)
    begun = []
    for _ in range(3):
        harness.turn()
        begun.append(sorted(number for number, tokens in harness.tokens.items() if tokens))
    # Two whole prompts and most of a third; then that, two more, and the rest.
    assert begun == [[0, 1], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]


def test_a_long_prompt_has_half_of_every_step_when_it_is_the_oldest(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=64, num_pages=256, max_len=1024)
    harness.add(0, [3 + i % 900 for i in range(640)], max_tokens=2)
    for number in range(1, 40):
        harness.add(number, [3 + (number + i) % 900 for i in range(30)], max_tokens=1)
    turns = 0
    while 0 not in harness.tokens:
        harness.turn()
        turns += 1
    assert turns <= 2 * 640 // 64 + 1


@pytest.mark.parametrize(("running", "chunk"), [(0, 60), (4, 12), (12, 12)])
def test_prompts_hold_up_who_decodes_less_than_nobody(tmp_path: Path, running: int, chunk: int) -> None:
    harness = Harness(tmp_path, step_tokens=64, mixed_tokens=16, num_slots=16, num_pages=256)
    for number in range(running):
        harness.add(number, 3, max_tokens=100)
        harness.turn()
    harness.add(100, [3 + i % 900 for i in range(60)], max_tokens=2)
    harness.turn()
    slot = int(np.flatnonzero(harness.slots.prompt_len == 60)[0])
    # The rest of 16 tokens, or as many as there are rows.
    assert int(harness.slots.planned[slot]) == chunk
    harness.run()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_who_stands_behind_a_long_prompt_is_not_overtaken_for_ever(tmp_path: Path, policy: str) -> None:
    harness = Harness(tmp_path, step_tokens=64, num_slots=32, num_pages=512, max_len=4096, policy=policy)
    harness.add(0, [3 + i % 900 for i in range(3000)], max_tokens=1)
    harness.add(1, [500 + i % 300 for i in range(100)], max_tokens=1, priority=9)
    number, turns = 2, 0
    while 1 not in harness.tokens:
        for _ in range(2):
            harness.add(number, [4 + (7 * number + i) % 900 for i in range(16)], max_tokens=1)
            number += 1
        harness.turn()
        turns += 1
    assert turns <= 16


def test_no_more_prompts_start_than_a_step_has_tokens_for(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=512, mixed_tokens=16, num_slots=64, num_pages=1024, max_len=512)
    for number in range(4):
        harness.add(number, 3, max_tokens=100)
    harness.turn(2)
    for number in range(4, 44):
        harness.add(number, [3 + 20 * number + i for i in range(12)], max_tokens=1)
    harness.turn(2)
    assert len(harness.planner.admission.prefilling) <= 8
    harness.run()
