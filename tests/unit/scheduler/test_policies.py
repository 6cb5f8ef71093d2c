"""Order of the queue, limits, ageing, preemption, and how near to ideal a full pool is used."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.ipc.messages import Finish
from scheduler_proc.policy import OVERTAKEN_LIMIT
from tests.support.scheduler import Harness, expected_null_tokens


def order_of_first_tokens(harness: Harness) -> list[int]:
    """Request numbers in the order in which they produced."""
    seen: list[int] = []
    for output in harness.outlet.messages:
        seen += [started.request for started in output.started]
    return seen


def test_fcfs_keeps_the_order_of_arrival(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1)
    for number in (5, 3, 9, 1):
        harness.add(number, 4 + number, max_tokens=2)
    harness.run()
    assert order_of_first_tokens(harness) == [5, 3, 9, 1]


def test_lof_takes_the_longest_answer_first(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, policy="lof")
    for number, output in ((1, 3), (2, 9), (3, 5)):
        harness.add(number, 4, max_tokens=output)
    harness.run()
    assert order_of_first_tokens(harness) == [2, 3, 1]


def test_lpm_takes_the_longest_cached_prefix_first(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, policy="lpm")
    cached = list(range(3, 67))
    harness.add(1, cached, max_tokens=2)
    harness.run()
    harness.add(2, list(range(500, 560)), max_tokens=2)
    harness.add(3, [*cached[:32], *range(600, 640)], max_tokens=2)
    harness.add(4, [*cached, 700], max_tokens=2)
    harness.run()
    assert order_of_first_tokens(harness) == [1, 4, 3, 2]


def test_dfs_weight_finishes_the_heavier_branch_first(tmp_path: Path) -> None:
    harness = Harness(tmp_path, policy="dfs-weight")
    left, right = list(range(3, 35)), list(range(203, 235))
    for number, prompt in ((1, left), (2, right)):
        harness.add(number, prompt, max_tokens=2)
        harness.run()
    for number, prompt in ((3, left), (4, right), (5, left), (6, right), (7, right)):
        harness.add(number, [*prompt, 400 + number], max_tokens=2)
    harness.run()
    assert order_of_first_tokens(harness)[2:] == [4, 6, 7, 3, 5]


def test_random_is_random_but_repeats_with_its_seed(tmp_path: Path) -> None:
    orders = []
    for index, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(index)
        folder.mkdir()
        harness = Harness(folder, num_slots=1, policy="random", seed=seed)
        for number in range(1, 9):
            harness.add(number, 4, max_tokens=2)
        harness.run()
        orders.append(order_of_first_tokens(harness))
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_ageing_lets_nobody_starve(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, policy="lof", num_pages=512)
    harness.add(1, 4, max_tokens=1)
    for number in range(2, OVERTAKEN_LIMIT + 40):
        harness.add(number, 4, max_tokens=3)
    harness.run()
    assert order_of_first_tokens(harness).index(1) == OVERTAKEN_LIMIT


def test_priority_goes_first_and_displaces_who_is_far_below(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, policy="priority", preemption_threshold=10)
    harness.add(1, 4, max_tokens=30)
    harness.turn(5)
    harness.add(2, 4, max_tokens=3, priority=5)
    harness.add(3, 4, max_tokens=3, priority=50)
    harness.run()
    assert order_of_first_tokens(harness) == [1, 3, 2]
    assert harness.planner.num_retractions == 1
    assert harness.tokens[1] == expected_null_tokens(4, 30)


def test_priority_displaces_for_memory_too(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=8, max_len=128, policy="priority")
    harness.add(1, 60, max_tokens=60)
    harness.turn(5)
    harness.add(2, 60, max_tokens=60, priority=100)
    harness.turn(4)
    assert harness.slots.num_used == 1
    assert harness.slots.occupant[harness.slots.used()[0]].request == 2
    harness.run()
    assert harness.tokens[1] == harness.tokens[2] == expected_null_tokens(60, 60)


def test_a_full_queue_answers_429_with_a_time(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, max_queued=2)
    for number in range(1, 7):
        harness.add(number, 4, max_tokens=20)
        harness.turn()
    harness.run()
    refused = [number for number, error in harness.errors.items() if error.status == 429]
    assert refused == [4, 5, 6]
    assert all(harness.errors[number].retry_after_s >= 1 for number in refused)
    assert all(harness.finish[number] is Finish.LENGTH for number in (1, 2, 3))


def test_requests_that_come_together_find_the_free_slots_before_the_queue(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=2, max_queued=1)
    for number in (1, 2, 3, 4):
        harness.add(number, 4, max_tokens=5)
    harness.run()
    assert set(harness.errors) == {4}


def test_several_prompts_may_be_in_mid_chunk(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=64, chunk_tokens=16, num_pages=128, max_len=512)
    for number in (1, 2, 3):
        harness.add(number, [number * 100 + i for i in range(80)], max_tokens=2)
    harness.turn(2)
    planned = harness.slots.planned[harness.slots.used()]
    assert sorted(planned.tolist()) == [32, 32, 32]
    harness.run()


def test_a_short_prompt_overtakes_a_long_one_that_still_moves(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=32, num_pages=256, max_len=2048)
    harness.add(1, list(range(3, 903)), max_tokens=1)
    harness.turn(3)
    before = int(harness.slots.planned[harness.planner.admission.prefilling[0]])
    for number in (2, 3, 4):
        harness.add(number, [900 + number] * 5, max_tokens=1)
    harness.turn(2)
    assert all(harness.finish.get(number) is Finish.LENGTH for number in (2, 3, 4))
    assert int(harness.slots.planned[harness.planner.admission.prefilling[0]]) - before >= 2 * 16
    harness.run()


@pytest.mark.parametrize("gap", [2, 4])
@pytest.mark.parametrize("step_tokens", [1, 2, 8, 16])
def test_nobody_waits_longer_than_the_step_gap(tmp_path: Path, gap: int, step_tokens: int) -> None:
    harness = Harness(tmp_path, step_tokens=step_tokens, num_slots=64, num_pages=512, max_len=256, max_step_gap=gap)
    for number in range(1, 65):
        harness.add(number, 3, max_tokens=25)
    last: dict[int, int] = {}
    longest = 0
    waited = 0
    for _ in range(400):
        before = harness.planner.step
        prefill = harness.planner.admission.prefilling[:1]
        progress = harness.slots.planned[prefill].tolist() if prefill else []
        harness.turn()
        step = harness.planner.step
        if step == before:
            break
        for row in harness.slots.decode().rows.tolist():
            number = int(harness.slots.request[row])
            longest = max(longest, step - int(harness.slots.last_step[row]))
            last[number] = step
        if prefill and harness.planner.admission.prefilling[:1] == prefill:
            waited = waited + 1 if harness.slots.planned[prefill].tolist() == progress else 0
            assert waited < gap
    assert longest < gap


def ideal_steps(lengths: list[tuple[int, int]], num_pages: int, page_size: int, num_slots: int, budget: int) -> int:
    """Steps of a planner that knows every length: first come, first served, admitting whenever memory will last.

    Without retraction; prompts are prefilled within the step's budget, chunked, before they decode.
    """

    def pages(tokens: int) -> int:
        return -(-tokens // page_size)

    waiting, running, steps = list(lengths), [], 0  # running: [tokens still to prefill, known tokens, tokens to come]
    while waiting or running:
        while waiting and len(running) < num_slots:
            prompt, output = waiting[0]
            trial = [*running, [prompt, prompt, output]]
            ends = sorted({rest for _, _, rest in trial})
            fits = all(
                sum(pages(known + min(end, rest)) for _, known, rest in trial if rest >= end) <= num_pages
                for end in ends
            )
            if not fits or sum(todo for todo, _, _ in running) >= budget:
                break
            running.append([prompt, prompt, output])
            waiting.pop(0)
        steps += 1
        room = budget - sum(1 for todo, _, _ in running if todo == 0)
        for row in running:
            if row[0]:
                taken = min(room, row[0])
                row[0] -= taken
                room -= taken
                if row[0]:
                    continue
            row[1] += 1
            row[2] -= 1
        running = [row for row in running if row[2] > 0]
    return steps


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("ends_early", [False, True])
def test_a_crowd_four_times_the_pool_takes_little_more_than_the_ideal(
    tmp_path: Path, depth: int, ends_early: bool
) -> None:
    rng = random.Random(3)
    page_size, num_pages, prompt = 16, 128, 32
    lengths = [(prompt, rng.randint(16, 170)) for _ in range(64)]
    assert sum(prompt + output for _, output in lengths) >= 3.9 * num_pages * page_size
    harness = Harness(
        tmp_path, depth=depth, num_slots=64, num_pages=num_pages, max_len=512, step_tokens=512, page_size=page_size
    )
    for number, (_, output) in enumerate(lengths, start=1):
        ids = [number * 10 + i for i in range(prompt)]
        last = expected_null_tokens(prompt, output)[-1]
        if ends_early:
            harness.add(number, ids, max_tokens=200, stop_token_ids=(last,))
        else:
            harness.add(number, ids, max_tokens=output)
    harness.run()
    for number, (_, output) in enumerate(lengths, start=1):
        assert harness.tokens[number] == expected_null_tokens(prompt, output)
    assert harness.planner.step <= 1.3 * ideal_steps(lengths, num_pages, page_size, 64, 512)
