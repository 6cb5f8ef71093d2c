"""Replaying a record on a device that knows the results: the same messages must give the same plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from engine.errors import ModelFileError
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import ToScheduler
from scheduler_proc.build import build_workload
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.process import Scheduler
from scheduler_proc.record import End, Header, Planned, Received, Resulted, Turn, encode_plan, read_record


class Replayed(msgspec.Struct):
    """What came of a replay."""

    num_turns: int
    num_plans: int
    difference: str | None
    """The first plan that is not the recorded one; None = all are."""


class _Inbox:
    def __init__(self) -> None:
        self.messages: list[ToScheduler] = []

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        messages, self.messages = self.messages, []
        yield from messages

    def wait(self, timeout_s: float) -> bool:
        return False


class _Nowhere:
    def send(self, message: msgspec.Struct) -> None:
        """Nobody listens to a replay."""


class _KnownDevice:
    """The `null` device with recorded tokens; plans are kept for comparison."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.results: deque[Resulted] = deque()

    def launch(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        return Handle(plan)

    def collect(self, handle: Handle) -> StepResult:
        if not self.results:
            raise RuntimeError("the replay collects a step that the recording did not")
        known = self.results.popleft()
        if known.error is not None:
            raise RuntimeError(known.error)
        tokens = np.frombuffer(known.tokens, np.int32)[:, None]
        failed = np.frombuffer(known.failed, np.bool_) if known.failed else None
        return StepResult(tokens, None, failed)

    def pages_freed(self, pages: np.ndarray) -> None:
        """There is no KV."""

    def close(self) -> None:
        """Nothing to let go of."""


def replay(path: Path, folder: Path) -> Replayed:
    """Replay the record at `path`; `folder` takes a heartbeat file. Raises ModelFileError if it is no record."""
    entries = read_record(path)
    header = next(entries, None)
    if not isinstance(header, Header):
        raise ModelFileError(f"{path} is not a record: it does not begin with a header")
    device, inbox = _KnownDevice(), _Inbox()
    now = [0.0]
    workload = build_workload(header.config, header.model, header.num_tokens, device.pages_freed, clock=lambda: now[0])
    heartbeat = Heartbeat(Board(folder / "board", 1, create=True), 0)
    depth = header.config.overlap_depth
    scheduler = Scheduler(workload, device, inbox, _Nowhere(), [_Nowhere()], heartbeat, depth)
    expected: list[bytes] = []
    done = Replayed(0, 0, None)

    def run_turn() -> bool:
        scheduler.turn()
        done.num_turns += 1
        for index, plan in enumerate(device.plans):
            known = expected[index] if index < len(expected) else None
            if encode_plan(plan) != known:
                done.difference = f"turn {done.num_turns}, step {plan.step}: the plan differs from the recorded one"
                return False
            done.num_plans += 1
        if len(device.plans) < len(expected):
            done.difference = f"turn {done.num_turns}: the recording launched a step, the replay did not"
            return False
        device.plans.clear()
        expected.clear()
        return True

    open_turn = False
    for entry in entries:
        if isinstance(entry, Turn):
            if open_turn and not run_turn():
                return done
            open_turn = True
            now[0] = entry.time_s
        elif isinstance(entry, Received):
            inbox.messages.append(entry.message)
        elif isinstance(entry, Planned):
            expected.append(entry.plan)
        elif isinstance(entry, Resulted):
            device.results.append(entry)
        elif isinstance(entry, End) and open_turn:
            run_turn()
    return done
