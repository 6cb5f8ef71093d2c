"""A plan's way from rank 0 to the others: what they are told, when they run it, and what happens if it fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.errors import DeviceLostError
from engine.ipc.board import Board, Heartbeat
from scheduler_proc.parallel.follow import follow
from scheduler_proc.parallel.lead import LeadingDevice
from scheduler_proc.parallel.wire import decode_plan, followers_plan
from scheduler_proc.plan import Adjustment, Handle, Joins, PageUpdates, PromptScores, StepPlan, StepResult
from scheduler_proc.record import Planned, encode_plan


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def plan_of(step: int) -> StepPlan:
    one = np.ones(1, np.float32)
    adjustment = Adjustment(4, 1.5, 0.5, 0.25, ids(5, 6), ids(), ids(9), one, 4, ids(2))
    joins = Joins(ids(4), ids(0), one, one, ids(-1), one, np.array([2**40]), ids(2, 7).reshape(1, 2), (adjustment,))
    return StepPlan(
        step=step,
        rows=ids(3, 4),
        num_decode=1,
        q_lens=ids(1, 2),
        kv_lens=ids(9, 2),
        tokens=ids(5, 6),
        sample=np.array([True, False]),
        all_greedy=False,
        needs_filter=True,
        rows_version=7,
        slots_version=-1,
        joins=joins,
        pages=(PageUpdates(ids(4), ids(0), ids(11)), None),
        adjusts_logits=True,
        logprobs=ids(3, -1),
        prompt_scores=(PromptScores(1, 0, ids(6), 2),),
    )


def test_a_plan_arrives_as_it_was() -> None:
    plan = plan_of(1)
    arrived = decode_plan(encode_plan(plan))
    assert encode_plan(arrived) == encode_plan(plan)
    assert arrived.joins is not None
    assert arrived.joins.stop_ids.shape == (1, 2)
    assert arrived.joins.seeds.tolist() == [2**40]
    assert arrived.sample.dtype == np.bool_
    assert arrived.tokens.flags.writeable


def test_a_follower_is_told_all_but_what_only_sampling_needs() -> None:
    plan = plan_of(1)
    told = followers_plan(plan)
    assert plan.joins is not None
    expected = msgspec.structs.replace(plan, logprobs=None, joins=msgspec.structs.replace(plan.joins, adjustments=()))
    assert encode_plan(told) == encode_plan(expected)
    assert plan.joins.adjustments and plan.logprobs is not None


class Steps:
    """A device, and the plans of a rank 0, that note in one list what happens."""

    def __init__(self, *turns: list[StepPlan], fails: str = "") -> None:
        self.events: list[str] = []
        self.turns = list(turns)
        self._fails = fails

    def launch(self, plan: StepPlan) -> Handle:
        return self._done("launch", Handle(plan))

    def collect(self, handle: Handle) -> StepResult:
        return self._done("collect", handle, StepResult(np.zeros((2, 1), np.int32), None, None))

    def pages_freed(self, pages: np.ndarray) -> None:
        self.events.append("freed")

    def close(self) -> None:
        self.events.append("close")

    def send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, Planned)
        self.events.append(f"send {decode_plan(message.plan).step}")

    def drain(self, limit: int = 4096) -> Iterator[Planned]:
        for plan in self.turns.pop(0):
            yield Planned(encode_plan(plan))

    def wait(self, timeout_s: float) -> bool:
        self.events.append("wait")
        return bool(self.turns) and bool(self.turns[0])

    def _done(self, what: str, handle: Handle, result: StepResult | None = None):
        self.events.append(f"{what} {handle.plan.step}")
        if self._fails == what:
            raise RuntimeError("broken")
        return handle if result is None else result


def test_rank_0_tells_the_others_before_it_runs_a_step_itself() -> None:
    steps = Steps()
    device = LeadingDevice(steps, [steps, steps])
    handle = device.launch(plan_of(5))
    device.collect(handle)
    device.pages_freed(ids(1))
    device.close()
    assert steps.events == ["send 5", "send 5", "launch 5", "collect 5", "freed", "close"]


@pytest.mark.parametrize("fails", ["launch", "collect"])
def test_a_step_that_fails_on_rank_0_is_the_end(fails: str, caplog: pytest.LogCaptureFixture) -> None:
    device = LeadingDevice(Steps(fails=fails), [])
    with pytest.raises(DeviceLostError, match="broken"):
        device.collect(device.launch(plan_of(5)))
    assert "event=step_failed step=5" in caplog.text


def _followed(tmp_path: Path, steps: Steps, max_in_flight: int) -> Heartbeat:
    board = Board(tmp_path / "board", 1, create=True)
    heartbeat = Heartbeat(board, 0)
    follow(steps, steps, heartbeat, max_in_flight, lambda: not steps.turns)
    assert board.read(0).step == 3
    return heartbeat


def test_a_follower_that_runs_steps_at_collect_does_so_at_once(tmp_path: Path) -> None:
    steps = Steps([plan_of(1)], [plan_of(2), plan_of(3)], [])
    _followed(tmp_path, steps, 0)
    told = ["launch 1", "collect 1", "wait", "launch 2", "collect 2", "launch 3", "collect 3", "wait", "wait"]
    assert steps.events == told


def test_a_follower_keeps_steps_in_flight_until_nothing_comes(tmp_path: Path) -> None:
    steps = Steps([plan_of(1)], [plan_of(2)], [plan_of(3)], [])
    _followed(tmp_path, steps, 1)
    told = ["launch 1", "wait", "launch 2", "collect 1", "wait", "launch 3", "collect 2", "wait", "collect 3", "wait"]
    assert steps.events == told


def test_a_followers_broken_step_ends_it(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        _followed(tmp_path, Steps([plan_of(1)], fails="collect"), 0)
