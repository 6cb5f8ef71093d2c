"""A scheduler that is recorded, put together as the process does it, with the null device or any other."""

from __future__ import annotations

import time
from pathlib import Path

from engine.config import EngineConfig, SchedulerOptions
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import Stamps, Stop, TokenizedRequest, pack_i32
from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig
from engine.sampling import SamplingParams
from scheduler_proc.build import build_workload
from scheduler_proc.plan import Device
from scheduler_proc.process import Scheduler
from scheduler_proc.record import Header, Recorder, RecordingDevice, RecordingInbox, TurnClock
from scheduler_proc.replay import Replayed, replay
from scheduler_proc.slots import SlotState
from scheduler_proc.worker.null import NullDevice
from tests.support.scheduler import VOCAB, ListInbox, Outlet


def model(max_len: int) -> ModelFiles:
    """A model that nobody loads."""
    config = ModelConfig("None", VOCAB, 8, 8, 1, 1, 1, 8, max_len, 1e-5, RopeConfig(), True)
    return ModelFiles("none", "dummy", config, "", (), "")


class Recorded:
    """The scheduler, its inbox, and the record it writes to `folder`/record (or `path`)."""

    def __init__(
        self,
        folder: Path,
        *,
        device: Device | None = None,
        path: Path | None = None,
        config: EngineConfig | None = None,
        max_len: int = 512,
        num_tokens: int = 512,
        **options: object,
    ) -> None:
        self.folder = folder
        self.path = path or folder / "record"
        config = config or EngineConfig(
            scheduler=SchedulerOptions(**{"device": "null", "max_running_requests": 4, "page_size": 4, **options})
        )
        files, clock = model(max_len), TurnClock()
        self.recorder = Recorder(self.path, Header(config, files, num_tokens), clock)
        self.device = RecordingDevice(device or NullDevice(VOCAB), self.recorder)
        self.workload = build_workload(config, files, num_tokens, self.device.pages_freed, clock)
        self.inbox, self.outlet, self.fronts = ListInbox(), Outlet(), [Outlet(), Outlet(), Outlet()]
        self.scheduler = Scheduler(
            self.workload,
            self.device,
            RecordingInbox(self.inbox, self.recorder),
            self.outlet,
            list(self.fronts),
            Heartbeat(Board(folder / f"recorded-{time.monotonic_ns()}", 1, create=True), 0),
            config.overlap_depth,
        )

    def add(
        self, number: int, prompt: list[int], *, salt: str | None = None, priority: int = 0, **sampling: object
    ) -> None:
        params = SamplingParams(**{"temperature": 0.0, "seed": 1, "ignore_eos": True, **sampling})
        ids = pack_i32(prompt)
        self.inbox.messages.append(
            TokenizedRequest(number, 0, 0, f"label {number}", ids, params, True, b"", Stamps(), salt, priority)
        )

    def confirm(self) -> None:
        """The detokenizer confirms every held end."""
        slots = self.workload.slots
        for slot in slots.used().tolist():
            if slots.state[slot] == SlotState.HELD:
                self.inbox.messages.append(Stop(int(slots.request[slot]), 0, slots.num_output(slot)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.turn()

    def run(self, limit: int = 2000) -> None:
        """Turn until nothing is left."""
        for _ in range(limit):
            self.confirm()
            self.scheduler.turn()
            if self.scheduler.idle and not self.inbox.messages:
                return
        raise AssertionError(f"not idle after {limit} turns")

    def replayed(self) -> Replayed:
        """End the recording, and replay it."""
        self.device.close()
        return replay(self.path, self.folder)
