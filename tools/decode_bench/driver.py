"""An engine without processes: the scheduler's loop over a device, with messages from and to memory."""

from __future__ import annotations

import gc
import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import FlushCall, RowReader, Stamps, StepOutput, TokenizedRequest, ToScheduler, pack_i32
from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams
from scheduler_proc.build import build
from scheduler_proc.plan import Device, Handle, StepPlan, StepResult
from scheduler_proc.process import Scheduler

Mark = Callable[[str], AbstractContextManager[object]]
"""Makes what is done in its context appear under a name in a profile."""


def unmarked(name: str) -> AbstractContextManager[object]:
    """The Mark of everyday: none."""
    return nullcontext()


class Inbox:
    """Requests from memory."""

    def __init__(self) -> None:
        self._messages: list[ToScheduler] = []

    def put(self, messages: Sequence[ToScheduler]) -> None:
        self._messages += messages

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        messages, self._messages = self._messages, []
        yield from messages

    def wait(self, timeout_s: float) -> bool:
        return bool(self._messages)


class Outlet:
    """Looks at what the scheduler says, and keeps what it is asked to."""

    def __init__(self) -> None:
        self.cached_tokens: list[int] = []
        """Of each request that has started: prompt tokens that came from the prefix cache."""
        self.answers: dict[int, list[int]] | None = None
        """Tokens by request, where somebody has put a table here."""
        self._rows = RowReader()

    def send(self, message: msgspec.Struct) -> None:
        """Raises RuntimeError for a request that failed: its time would be worth nothing."""
        if not isinstance(message, StepOutput):
            return
        if message.failed:
            raise RuntimeError(message.failed[0].error.message)
        self.cached_tokens += [started.cached_tokens for started in message.started]
        if self.answers is not None:
            at, ids = 0, np.frombuffer(message.tokens.tokens, np.int32)
            for number, _, first, count, _, _ in self._rows.rows(message.tokens):
                self.answers.setdefault(number, [])[first:] = ids[at : at + count].tolist()
                at += count


class MarkedDevice:
    """A device whose calls from the loop appear in profiles, under the names `launch` and `collect`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.mark: Mark = unmarked

    def launch(self, plan: StepPlan) -> Handle:
        with self.mark("launch"):
            return self._device.launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        with self.mark("collect"):
            return self._device.collect(handle)

    def pages_freed(self, pages: np.ndarray) -> None:
        self._device.pages_freed(pages)

    def close(self) -> None:
        self._device.close()


class _Stages(logging.Handler):
    """Seconds of every part of a start that logs how long it took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        found = re.search(r"event=(\w+).*\bseconds=([\d.]+)", record.getMessage())
        if found:
            self.seconds[found[1]] = self.seconds.get(found[1], 0.0) + float(found[2])


class Driver:
    """One engine: built once, then asked for answers."""

    def __init__(self, config: EngineConfig, model: ModelFiles, folder: Path) -> None:
        """folder: for the heartbeat's file. Raises EngineError as build does."""
        stages, log = _Stages(), logging.getLogger("scheduler_proc")
        level = log.level
        log.addHandler(stages)
        log.setLevel(logging.INFO)
        begin = time.perf_counter()
        try:
            workload, device = build(config, model)
        finally:
            log.removeHandler(stages)
            log.setLevel(level)
        self.build_s = time.perf_counter() - begin
        self.stages = stages.seconds
        self.device = MarkedDevice(device)
        self.outlet = Outlet()
        self._inbox = Inbox()
        self._number = 0
        heartbeat = Heartbeat(Board(folder / "board", 2, create=True), 1)
        self.scheduler = Scheduler(
            workload, self.device, self._inbox, self.outlet, [self.outlet], heartbeat, config.overlap_depth
        )
        # As the scheduler's process does after its start.
        gc.collect()
        gc.freeze()

    def ask(self, prompts: Sequence[np.ndarray], max_tokens: int | Sequence[int]) -> None:
        """Greedy requests (int32 ids each) of just so many tokens, all or each; they run as the loop is turned."""
        counts = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        for prompt, count in zip(prompts, counts, strict=True):
            self.request(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, seed=1))

    def request(self, prompt: np.ndarray, sampling: SamplingParams) -> int:
        """One request (int32 ids), and its number; it runs as the loop is turned."""
        self._number += 1
        message = TokenizedRequest(self._number, 0, 0, "", pack_i32(prompt), sampling, True, b"", Stamps())
        self._inbox.put([message])
        return self._number

    def finish(self) -> None:
        """Turn until nothing runs or waits."""
        turn, scheduler = self.scheduler.turn, self.scheduler
        turn()
        while not scheduler.idle:
            turn()

    def seconds(self, prompts: Sequence[np.ndarray], max_tokens: int | Sequence[int]) -> float:
        """From the call to the last token of the last request."""
        begin = time.perf_counter()
        self.ask(prompts, max_tokens)
        self.finish()
        return time.perf_counter() - begin

    def flush(self) -> None:
        """Drop every cached prefix; there must be a cache. Nothing may run."""
        self._inbox.put([FlushCall(0, 0)])
        self.finish()

    def close(self) -> None:
        """Let go of the device."""
        gc.unfreeze()
        self.device.close()
