"""The waiting queue: how many wait, what they are told, when they are looked at again, and whom ageing helps."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig, SchedulerOptions
from engine.ipc.messages import Abort
from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig
from scheduler_proc import admission, rate
from scheduler_proc.build import build_workload
from scheduler_proc.policy import OVERTAKEN_LIMIT
from scheduler_proc.request import Request
from tests.support.scheduler import Harness


def refused(harness: Harness) -> list:
    return [error for error in harness.errors.values() if error.status == 429]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("step_tokens", "prompt", "output"),
    [
        # Eight prompts share every step, so that the other slots are of no use.
        (64, 3000, 4),
        # No more than six can run, each of which shall move in every second step.
        (4, 4, 900),
    ],
)
def test_slots_that_cannot_be_used_do_not_lengthen_the_queue(
    tmp_path: Path, step_tokens: int, prompt: int, output: int
) -> None:
    harness = Harness(
        tmp_path, num_pages=4096, max_len=4000, num_slots=64, step_tokens=step_tokens, max_step_gap=2, max_queued=2
    )
    for number in range(40):
        harness.add(number, [3 + (7 * number + i) % 900 for i in range(prompt)], max_tokens=output)
        harness.turn()
    assert len(harness.planner.admission.waiting) == 2
    assert len(refused(harness)) == 40 - 2 - harness.slots.num_used
    told = re.search(r"full: (\d+) requests wait \(--max-queued-requests (\d+)\)", refused(harness)[0].message)
    assert told is not None
    assert told.groups() == ("2", "2")


def test_retry_after_follows_how_fast_requests_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(rate.time, "monotonic", lambda: now[0])
    harness = Harness(tmp_path, num_slots=1, num_pages=256, max_queued=2)
    waits = {}
    for seconds_each in (0.5, 30.0):
        for _ in range(20):
            harness.workload.ended.count()
            now[0] += seconds_each
        for number in (1, 2, 3, 4):
            harness.add(number + 100 * len(waits), 4, max_tokens=200)
            harness.turn()
        error = refused(harness)[-1]
        waits[seconds_each] = error.retry_after_s
        assert f"about {error.retry_after_s} s" in error.message
        for number in (1, 2, 3):
            harness.inbox.messages.append(Abort(number + 100 * len(waits) - 100, 0))
        harness.run()
    # Two wait, so the third to end makes room.
    assert waits[0.5] in (1, 2)
    assert 60 <= waits[30.0] <= 120


def test_a_full_scheduler_does_not_sort_its_queue_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, num_slots=2, num_pages=512, max_len=512, policy="priority")
    for number in (1, 2):
        harness.add(number, 10, max_tokens=400)
    harness.turn(3)
    for number in range(10, 300):
        harness.add(number, 4, max_tokens=4)
    harness.turn(2)
    asked = 0
    order = harness.planner.admission._order

    def counting(waiting: list[Request]) -> list[Request]:
        nonlocal asked
        asked += 1
        return order(waiting)

    monkeypatch.setattr(harness.planner.admission, "_order", counting)
    for number in range(1000, 1100):
        # Pages are taken in some of these steps, and each brings a request that stands behind the first.
        harness.add(number, 4, max_tokens=4)
        harness.turn()
    assert asked == 0
    harness.add(2000, 4, max_tokens=4, priority=50)
    harness.turn()
    assert asked == 1
    assert harness.planner.num_retractions == 1
    harness.run()


def test_who_waits_for_a_long_prefix_compares_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, num_pages=1024, max_len=9000, num_slots=64, step_tokens=64)
    shared = [3 + i % 900 for i in range(6000)]
    for number in range(40):
        harness.add(number, [*shared, 5 + number, 7, 8], max_tokens=2)
    harness.turn(5)
    compared = 0
    flatnonzero = np.flatnonzero

    def counting(values: np.ndarray) -> np.ndarray:
        nonlocal compared
        compared += len(values)
        return flatnonzero(values)

    monkeypatch.setattr(admission.np, "flatnonzero", counting)
    harness.turn(20)
    assert len(harness.planner.admission.waiting) == 39
    # Slots are looked through in every step; nobody compares a prompt.
    assert compared <= 21 * 4 * 64
    monkeypatch.undo()
    harness.run()
    assert all(harness.cached[number] >= 6000 - 64 for number in range(1, 40))


def test_who_waited_for_a_prefix_goes_on_when_that_one_leaves(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=1024, max_len=9000, num_slots=4, step_tokens=64)
    shared = [3 + i % 900 for i in range(3000)]
    for number in (1, 2):
        harness.add(number, [*shared, number], max_tokens=2)
    harness.turn(10)
    assert 2 in harness.planner.admission.waiting
    harness.inbox.messages.append(Abort(1, 0))
    harness.turn(2)
    assert 2 not in harness.planner.admission.waiting
    harness.run()


def test_who_waited_for_a_prefix_does_not_wait_for_the_rest_of_that_prompt(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_pages=1024, max_len=9000, num_slots=4, step_tokens=64)
    shared = [3 + i % 900 for i in range(320)]
    harness.add(1, [*shared, *([4] * 4000)], max_tokens=2)
    harness.add(2, [*shared, 9], max_tokens=2)
    harness.turn(9)
    assert 2 in harness.finish
    assert harness.cached[2] >= 256
    harness.run()


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_a_long_queue_is_looked_up_now_and_then(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, num_pages=1024, max_len=9000, num_slots=64, step_tokens=64, policy=policy)
    shared = [3 + i % 900 for i in range(6000)]
    for number in range(40):
        harness.add(number, [*shared, 5 + number, 7, 8], max_tokens=2)
    harness.turn(3)
    tree = harness.cache.tree
    assert tree is not None
    looked_at = 0
    find = tree._find

    def counting(namespace: bytes, keys: np.ndarray, limit: int) -> tuple:
        nonlocal looked_at
        looked_at += limit
        return find(namespace, keys, limit)

    monkeypatch.setattr(tree, "_find", counting)
    harness.turn(30)
    assert looked_at <= 30 * 40 * 1500
    assert looked_at > 0
    harness.run()


def test_looking_does_not_change_the_tree(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=1, num_pages=128, max_len=512, policy="lpm")
    prompt = list(range(3, 103))
    harness.add(1, prompt, max_tokens=1)
    harness.run()
    tree = harness.cache.tree
    assert tree is not None
    harness.add(2, [900] * 10, max_tokens=60)
    harness.turn(2)
    num_nodes = tree.num_nodes
    for number in range(3, 8):
        harness.add(number, [*prompt[: 16 * number - 40], 800], max_tokens=1)
    harness.turn(5)
    assert harness.planner.admission._order(list(harness.planner.admission.waiting.values()))
    assert tree.num_nodes == num_nodes
    harness.run()


def test_a_hit_counts_once_however_long_its_request_waits(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=8, num_pages=32, max_len=512, policy="lpm")
    prompt = list(range(3, 67))
    harness.add(1, prompt, max_tokens=1)
    harness.run()
    tree = harness.cache.tree
    assert tree is not None
    nodes = list(tree._nodes())
    assert [node.hits for node in nodes] == [0] * len(nodes)
    harness.add(2, [900] * 200, max_tokens=200)
    harness.turn(6)
    # There is no memory for it yet, and it is tried again whenever something changes.
    harness.add(3, [*prompt, *([7] * 200)], max_tokens=100)
    for number in range(10, 20):
        harness.add(number, [number] * 300, max_tokens=1)
        harness.turn(2)
    assert 3 in harness.planner.admission.waiting
    assert [node.hits for node in nodes] == [0] * len(nodes)
    while 3 not in harness.cached:
        harness.turn()
    assert {node.hits for node in nodes if node.parent is not None} <= {1}
    harness.run()


def test_ageing_does_not_wait_for_those_who_gave_up(tmp_path: Path) -> None:
    """A queue of a thousand before it is gone: from then on it counts who overtakes."""
    harness = Harness(tmp_path, num_slots=1, num_pages=512, policy="lof")
    harness.add(1, 4, max_tokens=2)
    for number in range(2, 1002):
        harness.add(number, 4, max_tokens=20)
    harness.add(5000, 4, max_tokens=1)
    harness.turn()
    harness.inbox.messages = [Abort(number, 0) for number in range(2, 1002)]
    harness.turn()
    for number in range(6000, 6000 + OVERTAKEN_LIMIT + 20):
        harness.add(number, 4, max_tokens=3)
    harness.run()
    seen = [started.request for output in harness.outlet.messages for started in output.started]
    assert seen.index(5000) <= OVERTAKEN_LIMIT + 3


def test_what_left_the_queue_is_not_remembered_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MOST_LEFT", 50)
    harness = Harness(tmp_path, num_slots=1, num_pages=512, policy="lof")
    queue = harness.planner.admission
    harness.add(1, 4, max_tokens=250)
    harness.turn(2)
    for number in range(2, 202):
        harness.add(number, 4, max_tokens=9)
    harness.turn()
    last = queue.waiting[201]
    queue.num_admitted += 300
    before = queue._overtaken(last)
    for number in range(2, 200):
        harness.inbox.messages.append(Abort(number, 0))
        harness.turn()
        assert queue._overtaken(last) == before + number - 1
    assert len(queue._left) <= 50
    harness.inbox.messages += [Abort(200, 0), Abort(201, 0)]
    harness.turn()
    assert queue._left == []
    assert not queue._seen
    harness.run()


def test_a_retracted_request_ages_from_its_own_place(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=2, num_pages=64, policy="lof")
    queue = harness.planner.admission
    for number in (1, 2):
        harness.add(number, 4, max_tokens=100)
    harness.turn(3)
    for number in range(3, 100):
        harness.add(number, 4, max_tokens=5)
    harness.turn()
    slot = next(int(s) for s in harness.slots.used() if harness.slots.request[s] == 1)
    harness.planner._retract(slot)
    # Nobody who waits came before it.
    assert queue.waiting[1].ahead == queue.num_admitted
    harness.run()


@pytest.mark.parametrize(("budget", "most"), [(256, None), (8, 24)])
def test_a_budget_that_allows_fewer_requests_says_so(
    budget: int, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    model = ModelConfig("X", 1000, 8, 8, 1, 1, 1, 8, 512, 1e-5, RopeConfig(), True)
    options = SchedulerOptions(device="null", max_total_tokens=512, chunked_prefill_size=budget)
    workload = build_workload(
        EngineConfig(scheduler=options), ModelFiles("m", "dummy", model, "", (), ""), 512, lambda pages: None
    )
    told = [record.message for record in caplog.records if "event=fewer_running_requests" in record.message]
    if most is None:
        assert told == []
    else:
        assert workload.planner.admission.max_rows == most
        assert len(told) == 1
        assert f"asked=64 most={most} " in told[0]
        assert "--chunked-prefill-size 8" in told[0]
