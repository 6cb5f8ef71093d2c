"""`python -m tests.unit.parallel.rank_one FOLDER`: rank 1 of 2 for the starts that FOLDER/work tells, one by one.

Each ends when FOLDER/done-N appears, N from 0. Plans come through the socket FOLDER/plans.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import Hello
from engine.ipc.sockets import Puller, context
from engine.model_files.types import ModelFiles
from scheduler_proc.build import build_device
from scheduler_proc.parallel.follow import follow
from scheduler_proc.parallel.group import Distributed
from scheduler_proc.record import Planned

HELLO = Hello("a test", "", "")


def main() -> None:
    folder = Path(sys.argv[1])
    model, configs = msgspec.msgpack.decode(
        (folder / "work").read_bytes(), type=tuple[ModelFiles, tuple[EngineConfig, ...]]
    )
    group = Distributed(1, 2, folder / "meeting", torch.device("cpu"), 60.0)
    plans = Puller(context(), f"ipc://{folder}/plans", Hello | Planned, HELLO)
    heartbeat = Heartbeat(Board(folder / "board", 1, create=True), 0)
    for number, config in enumerate(configs):
        device, _ = build_device(config, model, heartbeat.touch, group)
        follow(device, plans, heartbeat, 0, (folder / f"done-{number}").exists)
    group.close()


if __name__ == "__main__":
    main()
