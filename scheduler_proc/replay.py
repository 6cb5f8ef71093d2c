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
from scheduler_proc.plan import Handle, StepPlan, StepResult, TokenScores
from scheduler_proc.process import Scheduler, Sender
from scheduler_proc.record import (
    End,
    Header,
    Planned,
    Received,
    Refused,
    Resulted,
    Turn,
    TurnClock,
    encode_plan,
    read_record,
)


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
    """Answers with the recorded results; plans are kept for comparison."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.refusal: Refused | None = None
        """Of the plan that this turn launches."""
        self.results: deque[Resulted] = deque()
        self.num_missing = 0
        """Steps collected that the recording did not collect in this turn."""

    def launch(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        if self.refusal is not None:
            raise RuntimeError(self.refusal.error)
        return Handle(plan)

    def collect(self, handle: Handle) -> StepResult:
        if not self.results:
            self.num_missing += 1
            raise RuntimeError("the replay collects a step that the recording did not")
        known = self.results.popleft()
        if known.error is not None:
            raise RuntimeError(known.error)
        plan = handle.plan
        tokens = np.frombuffer(known.tokens, np.int32).reshape(len(plan.rows), -1)
        failed = np.frombuffer(known.failed, np.bool_) if known.failed else None
        scores = None if plan.logprobs is None else _no_scores(tokens.size, int(plan.logprobs.max()))
        prompt_scores = tuple(_no_scores(len(wanted.targets), wanted.width) for wanted in plan.prompt_scores)
        counts, drafted = (np.frombuffer(part, np.int32) if part else None for part in (known.counts, known.drafted))
        return StepResult(tokens, counts, failed, scores, prompt_scores, drafted)

    def pages_freed(self, pages: np.ndarray) -> None:
        """There is no KV."""

    def close(self) -> None:
        """Nothing to let go of."""


def _no_scores(num: int, width: int) -> TokenScores:
    """Logprobs of the right shape: what they are makes no difference to a plan."""
    width = max(width, 0)
    return TokenScores(np.zeros(num, np.float32), np.zeros((num, width), np.int32), np.zeros((num, width), np.float32))


class _Replay:
    """A scheduler built from a record's header, and the turn of the record that it does next."""

    def __init__(self, header: Header, folder: Path) -> None:
        self.done = Replayed(0, 0, None)
        self.device, self.inbox, self.clock = _KnownDevice(), _Inbox(), TurnClock()
        self._fronts: list[Sender] = []
        self._expected: list[bytes] = []
        # Nobody shall hear of these events, least of all those who listen to a running server.
        options = msgspec.structs.replace(header.config.scheduler, kv_events_endpoint=None)
        config = msgspec.structs.replace(header.config, scheduler=options)
        workload = build_workload(config, header.model, header.num_tokens, self.device.pages_freed, self.clock)
        heartbeat = Heartbeat(Board(folder / "board", 1, create=True), 0)
        self._scheduler = Scheduler(
            workload, self.device, self.inbox, _Nowhere(), self._fronts, heartbeat, config.overlap_depth
        )

    def take(self, entry: Received | Planned | Refused | Resulted) -> None:
        """One more thing that happened in the turn."""
        if isinstance(entry, Received):
            self.inbox.messages.append(entry.message)
            missing = getattr(entry.message, "front", 0) + 1 - len(self._fronts)
            self._fronts += [_Nowhere() for _ in range(missing)]
        elif isinstance(entry, Planned):
            self._expected.append(entry.plan)
        elif isinstance(entry, Refused):
            self.device.refusal = entry
        else:
            self.device.results.append(entry)

    def turn(self) -> bool:
        """Do the turn; False if it went another way than the recorded one, and `done` says how."""
        device, done = self.device, self.done
        self._scheduler.turn()
        done.num_turns += 1
        done.difference = self._difference()
        done.num_plans += len(device.plans) if done.difference is None else 0
        device.plans.clear()
        device.refusal = None
        self._expected.clear()
        return done.difference is None

    def _difference(self) -> str | None:
        where, device, expected = f"turn {self.done.num_turns}", self.device, self._expected
        for index, plan in enumerate(device.plans):
            if index >= len(expected):
                return f"{where}, step {plan.step}: the replay launched a step, the recording did not"
            if encode_plan(plan) != expected[index]:
                return f"{where}, step {plan.step}: the plan differs from the recorded one"
        if len(device.plans) < len(expected):
            return f"{where}: the recording launched a step, the replay did not"
        if device.num_missing:
            return f"{where}: the replay collected a step, the recording did not"
        if device.results:
            return f"{where}: the recording collected a step, the replay did not"
        return None


def replay(path: Path, folder: Path) -> Replayed:
    """Replay the record at `path`; `folder` takes a heartbeat file. Raises ModelFileError if it is no record."""
    entries = read_record(path)
    header = next(entries, None)
    if not isinstance(header, Header):
        raise ModelFileError(f"{path} is not a record: it does not begin with a header")
    it = _Replay(header, folder)
    open_turn = False
    for entry in entries:
        if isinstance(entry, Turn | End):
            if open_turn and not it.turn():
                break
            open_turn = isinstance(entry, Turn)
            if isinstance(entry, Turn):
                it.clock.now_s = entry.time_s
        elif not isinstance(entry, Header):
            it.take(entry)
    return it.done
