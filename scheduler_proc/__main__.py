"""`python -m scheduler_proc FD`: the scheduler process, configured by the message on file descriptor FD."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from engine.errors import EngineError
from engine.ipc.child import begin, fail_start, until_stopped
from engine.ipc.messages import ToScheduler
from engine.ipc.peers import announce, connect
from engine.ipc.sockets import Puller, context
from scheduler_proc.build import build
from scheduler_proc.process import Inbox, Scheduler
from scheduler_proc.record import Header, Recorder, RecordingDevice, RecordingInbox, TurnClock


def main() -> int:
    child, heartbeat, board, stop = begin(int(sys.argv[1]))
    ctx = context()
    layout, hello = child.layout, child.hello()
    try:
        inbox: Inbox = Puller(ctx, layout.address(child.name), ToScheduler, hello)
        record, turn_clock = child.config.scheduler.record, TurnClock()
        clock = time.monotonic if record is None else turn_clock
        workload, device = build(child.config, child.model, heartbeat.touch, clock)
        fronts = list(connect(ctx, child, "front").values())
        (detokenizer,) = connect(ctx, child, "detokenizer").values()
        if record is not None:
            num_tokens = workload.cache.pools[0].num_pages * workload.cache.page_size
            recorder = Recorder(Path(record), Header(child.config, child.model, num_tokens), turn_clock)
            inbox, device = RecordingInbox(inbox, recorder), RecordingDevice(device, recorder)
        scheduler = Scheduler(workload, device, inbox, detokenizer, list(fronts), heartbeat, child.config.overlap_depth)
        facts: dict[str, str | int | float] = {
            "pages": workload.cache.pools[0].num_pages,
            "page_size": workload.cache.page_size,
            "max_len": workload.intake.max_len,
            "max_running_requests": workload.slots.num_slots,
        }
        announce(child, heartbeat, fronts, facts)
        scheduler.run(until_stopped(stop, board))
        device.close()
    except EngineError as error:
        return fail_start(child, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
