"""`python -m scheduler_proc FD`: a scheduler, or a rank that shares its model, configured by the message on file FD."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import zmq

from engine.config import EngineConfig
from engine.errors import DeviceLostError, EngineError, StartupError
from engine.ipc.board import Heartbeat
from engine.ipc.child import ChildConfig, begin, fail_start, until_stopped
from engine.ipc.messages import Hello, ToScheduler
from engine.ipc.peers import announce, connect
from engine.ipc.sockets import Puller, context
from engine.sharing import check_shares
from scheduler_proc.build import build, build_device
from scheduler_proc.parallel.fit import check_options
from scheduler_proc.parallel.follow import follow
from scheduler_proc.parallel.lead import LeadingDevice
from scheduler_proc.process import Inbox, Scheduler
from scheduler_proc.record import Header, Planned, Recorder, RecordingDevice, RecordingInbox, TurnClock
from scheduler_proc.settle import settle

if TYPE_CHECKING:
    from scheduler_proc.parallel.group import Group

log = logging.getLogger(__name__)


def main() -> int:
    child, heartbeat, board, stop = begin(int(sys.argv[1]))
    stopped = until_stopped(stop, board)
    try:
        config = settle(child.config)
        if config.process.tp_size > 1:
            check_options(config)
            check_shares(child.model.config, config.process.tp_size)
        scheduler, rank = child.layout.rank_of(child.name)
        group = _group(config, child.layout.meeting(scheduler), rank)
        run = _schedule if rank == 0 else _follow
        run(child, config, group, context(), heartbeat, stopped)
        if group is not None:
            group.close()
    except EngineError as error:
        return fail_start(child, error)
    return 0


def _group(config: EngineConfig, meeting: Path, rank: int) -> Group | None:
    """The processes that share the model; None if there is but one. Raises StartupError if they cannot meet."""
    size = config.process.tp_size
    if size == 1:
        return None
    import torch

    from scheduler_proc.parallel.group import Distributed

    device = torch.device("cuda", rank) if config.device == "cuda" else torch.device("cpu")
    try:
        return Distributed(rank, size, meeting, device, config.process.start_timeout)
    except RuntimeError as error:
        raise StartupError(f"the processes that share the model cannot reach each other: {error}") from error


def _schedule(
    child: ChildConfig,
    config: EngineConfig,
    group: Group | None,
    ctx: zmq.Context,
    heartbeat: Heartbeat,
    stopped: Callable[[], bool],
) -> None:
    """Be a scheduler until `stopped()`: rank 0 of those that share the model. Raises EngineError."""
    inbox: Inbox = Puller(ctx, child.layout.address(child.name), ToScheduler, child.hello())
    record, turn_clock = config.scheduler.record, TurnClock()
    clock = time.monotonic if record is None else turn_clock
    workload, device = build(config, child.model, heartbeat.touch, clock, group)
    if group is not None:
        device = LeadingDevice(device, list(connect(ctx, child, f"{child.name} rank").values()))
    fronts = list(connect(ctx, child, "front").values())
    (detokenizer,) = connect(ctx, child, "detokenizer").values()
    if record is not None:
        num_tokens = workload.cache.pools[0].num_pages * workload.cache.page_size
        recorder = Recorder(Path(record), Header(config, child.model, num_tokens), turn_clock)
        inbox, device = RecordingInbox(inbox, recorder), RecordingDevice(device, recorder)
    scheduler = Scheduler(workload, device, inbox, detokenizer, list(fronts), heartbeat, config.overlap_depth)
    facts: dict[str, str | int | float] = {
        "pages": workload.cache.pools[0].num_pages,
        "page_size": workload.cache.page_size,
        "max_len": workload.intake.max_len,
        "max_running_requests": workload.slots.num_slots,
    }
    announce(child, heartbeat, fronts, facts)
    scheduler.run(stopped)
    device.close()


def _follow(
    child: ChildConfig,
    config: EngineConfig,
    group: Group | None,
    ctx: zmq.Context,
    heartbeat: Heartbeat,
    stopped: Callable[[], bool],
) -> None:
    """Run rank 0's plans until `stopped()`. Raises EngineError."""
    plans = Puller(ctx, child.layout.address(child.name), Hello | Planned, child.hello())
    device, _ = build_device(config, child.model, heartbeat.touch, group)
    announce(child, heartbeat, connect(ctx, child, "front").values())
    # Elsewhere a step runs when it is collected, and rank 0 waits for it.
    max_in_flight = config.overlap_depth if config.device == "cuda" else 0
    try:
        follow(device, plans, heartbeat, max_in_flight, stopped)
    except EngineError:
        raise
    except Exception as error:
        # At the end rank 0 may leave amid a step.
        if not stopped():
            log.exception("event=step_failed effect=the ranks no longer agree")
            raise DeviceLostError(f"a step failed on one of the processes that share the model: {error}") from error
    device.close()


if __name__ == "__main__":
    sys.exit(main())
