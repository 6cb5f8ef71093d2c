"""An exception at plan, launch, collect or send fails the requests concerned with 500 and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import Abort, Finish
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.worker.null import NullDevice
from tests.support.scheduler import VOCAB, Harness, expected_null_tokens, pages_kept


class FaultyDevice(NullDevice):
    """Breaks once, at the step a test names."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.break_launch_at = self.break_collect_at = self.nan_at = -1

    def launch(self, plan: StepPlan) -> Handle:
        if plan.step == self.break_launch_at:
            raise RuntimeError("launch broke")
        return super().launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        if handle.plan.step == self.break_collect_at:
            raise RuntimeError("collect broke")
        result = super().collect(handle)
        if handle.plan.step == self.nan_at:
            result.failed = np.zeros(len(handle.plan.rows), bool)
            result.failed[0] = True
        return result


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("where", ["launch", "collect"])
def test_a_broken_step_fails_its_requests_only(tmp_path: Path, depth: int, where: str) -> None:
    device = FaultyDevice()
    setattr(device, f"break_{where}_at", 4)
    harness = Harness(tmp_path, device=device, depth=depth, num_slots=2)
    for number in (1, 2, 3, 4):
        harness.add(number, 6, max_tokens=10)
    harness.run()
    assert {n: e.status for n, e in harness.errors.items()} == {1: 500, 2: 500}
    for number in (3, 4):
        assert harness.tokens[number] == expected_null_tokens(6, 10)
    assert pages_kept(harness)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_of_nan_fails_alone(tmp_path: Path, depth: int) -> None:
    device = FaultyDevice()
    device.nan_at = 4
    harness = Harness(tmp_path, device=device, depth=depth)
    for number in (1, 2, 3):
        harness.add(number, 6, max_tokens=10)
    harness.run()
    assert set(harness.errors) == {1}
    assert harness.errors[1].code == "nan"
    assert harness.tokens[2] == harness.tokens[3] == expected_null_tokens(6, 10)


def test_an_exception_while_admitting_is_that_requests_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 6, max_tokens=10)
    harness.turn(3)
    join = harness.slots.join

    def broken(request: object, *args: object) -> int:
        if request.request == 2:  # type: ignore[attr-defined]
            raise RuntimeError("join broke")
        return join(request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.slots, "join", broken)
    harness.add(2, 6, max_tokens=10)
    harness.add(3, 6, max_tokens=10)
    harness.run()
    assert set(harness.errors) == {2}
    assert harness.errors[2].status == 500
    assert harness.tokens[1] == harness.tokens[3] == expected_null_tokens(6, 10)


def test_an_exception_while_planning_fails_the_running_batch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tmp_path, num_slots=2)
    for number in (1, 2, 3):
        harness.add(number, 6, max_tokens=10)
    harness.turn(3)

    def broken() -> None:
        monkeypatch.undo()
        raise RuntimeError("plan broke")

    monkeypatch.setattr(harness.planner, "plan", broken)
    harness.run()
    assert set(harness.errors) == {1, 2}
    assert harness.tokens[3] == expected_null_tokens(6, 10)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_message_that_cannot_be_sent_fails_its_requests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    harness = Harness(tmp_path, num_slots=2, depth=depth)
    for number in (1, 2, 3):
        harness.add(number, 6, max_tokens=10)
    harness.turn(3)

    def broken(message: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("send broke")

    monkeypatch.setattr(harness.outlet, "send", broken)
    harness.run()
    assert set(harness.errors) == {1, 2}
    assert all(error.status == 500 for error in harness.errors.values())
    assert harness.tokens[3] == expected_null_tokens(6, 10)
    assert harness.finish[3] is Finish.LENGTH


def test_a_lost_end_is_told_as_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 6, max_tokens=3)
    harness.turn(2)

    def broken(message: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("send broke")

    monkeypatch.setattr(harness.outlet, "send", broken)
    harness.run()
    assert harness.errors[1].status == 500


@pytest.mark.parametrize("depth", [0, 1])
def test_nothing_of_a_broken_requests_prefix_is_shared(tmp_path: Path, depth: int) -> None:
    """Who says that what it found was not broken already?"""
    device = FaultyDevice()
    harness = Harness(tmp_path, device=device, depth=depth, step_tokens=32, max_len=256)
    prompt = list(range(3, 103))
    harness.add(1, prompt[:48], max_tokens=2)
    harness.run()
    device.nan_at = harness.planner.step + 2
    harness.add(2, prompt, max_tokens=2)
    harness.run()
    assert set(harness.errors) == {2}
    harness.add(3, prompt, max_tokens=2)
    harness.run()
    assert harness.cached[3] == 0
    assert pages_kept(harness)


def test_a_lost_page_is_found_and_reclaimed_when_idle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 40, max_tokens=2)
    harness.run()
    harness.cache.pools[0].take(3)
    harness.workload.audit_idle()
    assert "no owner" in caplog.text
    assert harness.workload.audit_errors == 3
    assert harness.workload.audit() == []
    assert pages_kept(harness)


def test_a_parameter_that_no_array_can_hold_costs_only_its_request(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=2)
    harness.add(1, 6, max_tokens=10)
    harness.turn(3)
    harness.add(2, 6, max_tokens=10, temperature=1.0, top_k=2**40)
    harness.add(3, 6, max_tokens=3, stop_token_ids=tuple(range(3, 40)))
    harness.add(4, 6, max_tokens=10)
    harness.run()
    assert set(harness.errors) == {2, 3}
    assert harness.slots.num_free == 2
    assert harness.tokens[1] == harness.tokens[4] == expected_null_tokens(6, 10)


def test_thousands_of_waiting_requests_are_aborted_in_no_time(tmp_path: Path) -> None:
    harness = Harness(tmp_path, num_slots=2)
    for number in range(1, 8001):
        harness.add(number, 20, max_tokens=200)
    harness.turn()
    looked_at = 0

    class Counting(dict):  # type: ignore[type-arg]
        def __iter__(self) -> object:
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    harness.planner.admission.waiting = Counting(harness.planner.admission.waiting)
    harness.inbox.messages = [Abort(number, 0) for number in range(8000, 0, -1)]
    harness.turn()
    assert looked_at == 0
    harness.run()
    assert len(harness.finish) == 8000
