"""The prefix cache in the scheduler: what is found, counted, kept apart, pinned, flushed, and given back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine.ipc.messages import Abort, Finish, FlushCall, PinTokens, Stop, UnpinCall, pack_i32
from scheduler_proc.cache.groups import CacheGroup
from tests.support.scheduler import FULL, Harness, expected_null_tokens, pages_kept

LONG = list(range(3, 103))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_second_request_takes_over_the_first_ones_prefix(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth)
    harness.add(1, LONG, max_tokens=5)
    harness.run()
    steps = harness.planner.step
    harness.add(2, [*LONG, 7, 8, 9], max_tokens=5)
    harness.run()
    assert harness.cached == {1: 0, 2: 96}
    assert harness.tokens[2] == expected_null_tokens(103, 5)
    assert harness.planner.step - steps == 5


def test_the_last_token_is_always_computed(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    for number in (1, 2):
        harness.add(number, LONG[:32], max_tokens=3)
        harness.run()
    assert harness.cached == {1: 0, 2: 16}


def test_output_is_shared_too_but_not_beyond_a_stop(tmp_path: Path) -> None:
    harness = Harness(tmp_path, page_size=1)
    harness.add(1, LONG[:10], max_tokens=8)
    harness.run()
    harness.add(2, [*LONG[:10], *harness.tokens[1], 5], max_tokens=1)
    harness.run()
    assert harness.cached[2] == 17
    harness = Harness(tmp_path, page_size=1, confirm_holds=False)
    harness.add(1, LONG[:10], max_tokens=8, stop=("x",))
    harness.turn(20)
    harness.inbox.messages.append(Stop(1, 0, 3))
    harness.run()
    harness.add(2, [*LONG[:10], *harness.tokens[1], 5], max_tokens=1)
    harness.run()
    assert harness.cached[2] == 13


def test_salts_keep_tenants_apart(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    for number, salt in enumerate([None, "a", "b", "a", None], start=1):
        harness.add(number, LONG, max_tokens=2, salt=salt)
        harness.run()
    assert harness.cached == {1: 0, 2: 0, 3: 0, 4: 96, 5: 96}


def test_without_the_cache_nothing_is_shared(tmp_path: Path) -> None:
    harness = Harness(tmp_path, radix=False)
    for number in (1, 2):
        harness.add(number, LONG, max_tokens=2)
        harness.run()
    assert harness.cached == {1: 0, 2: 0}
    assert harness.cache.pools[0].num_free == harness.cache.pools[0].num_pages


def test_chunks_are_shared_before_the_prompt_is_done(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=16, num_pages=64, max_len=512)
    harness.add(1, 200, max_tokens=3)
    harness.turn(6)
    harness.inbox.messages.append(Abort(1, 0))
    harness.run()
    harness.add(2, 200, max_tokens=3)
    harness.run()
    assert 64 <= harness.cached[2] <= 96


def test_a_request_waits_for_the_prefix_that_another_is_computing(tmp_path: Path) -> None:
    harness = Harness(tmp_path, step_tokens=64, num_slots=8, num_pages=256, max_len=1024)
    shared = list(range(3, 403))
    for number in range(1, 7):
        harness.add(number, [*shared, 500 + number], max_tokens=2)
    harness.run()
    assert harness.cached[1] == 0
    assert all(harness.cached[number] >= 400 - 32 for number in range(2, 7))


def test_pins_survive_pressure_until_they_are_let_go(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=24, max_len=300)
    harness.add(1, LONG, max_tokens=2)
    harness.run()
    answer = harness.workload.answer(PinTokens(0, 5, pack_i32(LONG), 60.0, None))
    assert (answer.error, answer.values["tokens"]) == (None, 96)

    def pressure(first: int) -> None:
        for number in range(first, first + 6):
            harness.add(number, [number * 7 % 900 + i for i in range(80)], max_tokens=90)
        harness.run()

    pressure(10)
    harness.add(2, LONG, max_tokens=2)
    harness.run()
    assert harness.cached[2] == 96
    assert harness.workload.answer(UnpinCall(0, 6, answer.values["pin"])).values == {"found": 1}
    assert harness.workload.answer(UnpinCall(0, 7, answer.values["pin"])).values == {"found": 0}
    pressure(30)
    harness.add(3, LONG, max_tokens=2)
    harness.run()
    assert harness.cached[3] == 0


def test_pinning_what_is_not_cached_is_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    answer = harness.workload.answer(PinTokens(0, 5, pack_i32(LONG), 60.0, None))
    assert answer.error is not None
    assert answer.error.status == 400


def test_flush_empties_the_tree(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.add(1, LONG, max_tokens=2)
    harness.run()
    assert harness.workload.answer(FlushCall(0, 1)).values == {"pages": 6}
    harness.add(2, LONG, max_tokens=2)
    harness.run()
    assert harness.cached[2] == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_window_group_keeps_only_its_window(tmp_path: Path, depth: int, page_size: int) -> None:
    groups = (FULL, CacheGroup("window", "window", 32))
    harness = Harness(
        tmp_path,
        depth=depth,
        page_size=page_size,
        groups=groups,
        num_pages=1024 // page_size,
        group_pages=(1024 // page_size, 400 // page_size),
        max_len=400,
        step_tokens=24,
        num_slots=4,
    )
    harness.add(1, LONG, max_tokens=60)
    most = 0
    while not harness.scheduler.idle or harness.inbox.messages:
        harness.turn()
        assert harness.workload.audit() == []
        if harness.slots.num_used:
            most = max(most, len(harness.cache.tables[1].tail(harness.slots.occupant[0].slot)) * page_size)
    assert most <= 32 + 24 + 16 + 2 * page_size
    harness.add(2, [*LONG, *harness.tokens[1][:20], 9], max_tokens=30)
    harness.run()
    assert harness.cached[2] in (0, 100, 119, 120 - 120 % page_size)
    assert harness.tokens[2] == expected_null_tokens(121, 30)
    assert pages_kept(harness)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, CacheGroup("window", "window", 24))])
def test_random_traffic_over_shared_prefixes_stays_sound(
    tmp_path: Path, depth: int, groups: tuple[CacheGroup, ...]
) -> None:
    """Small pool, few prefixes, aborts everywhere: every turn's audit is clean and every answer right."""
    rng = random.Random(depth * 2 + len(groups))
    harness = Harness(
        tmp_path,
        depth=depth,
        page_size=4,
        groups=groups,
        num_pages=60,
        max_len=200,
        step_tokens=20,
        num_slots=6,
        conservativeness=0.2,
        policy=["fcfs", "lpm", "dfs-weight"][depth],
    )
    prompts: dict[int, list[int]] = {}
    for number in range(1, 160):
        trunk = [3 + rng.randint(0, 1)] * rng.randint(1, 8)
        prompts[number] = [t for t in trunk for _ in range(4)] + [rng.randint(3, 5) for _ in range(rng.randint(1, 12))]
        stop = ("x",) if rng.random() < 0.3 else ()
        salt = rng.choice([None, None, "s"])
        harness.add(number, prompts[number], max_tokens=rng.randint(1, 60), stop=stop, salt=salt)
        for _ in range(rng.randint(0, 5)):
            harness.turn()
            assert harness.workload.audit() == []
        if rng.random() < 0.3:
            harness.inbox.messages.append(Abort(rng.randint(1, number), 0))
        if rng.random() < 0.05:
            harness.workload.answer(FlushCall(0, 1))
    harness.run()
    assert pages_kept(harness)
    for number, finish in harness.finish.items():
        if finish is not Finish.ABORT:
            tokens = harness.tokens[number]
            assert tokens == expected_null_tokens(len(prompts[number]), len(tokens))
    assert set(harness.finish) == set(prompts)
