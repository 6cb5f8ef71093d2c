"""`python -m scheduler_proc FD`: the scheduler process, configured by the message on file descriptor FD."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from engine.errors import EngineError
from engine.ipc.board import State
from engine.ipc.child import begin, fail_start, until_stopped
from engine.ipc.messages import Ready, ToScheduler
from engine.ipc.sockets import Puller, Pusher, context
from scheduler_proc.build import build
from scheduler_proc.process import Inbox, Scheduler
from scheduler_proc.record import Header, Recorder, RecordingDevice, RecordingInbox


def main() -> int:
    child, heartbeat, board, stop = begin(int(sys.argv[1]))
    ctx = context()
    layout, hello = child.layout, child.hello()
    try:
        inbox: Inbox = Puller(ctx, layout.address(child.name), ToScheduler, hello)
        workload, device = build(child.config, child.model, heartbeat.touch)
        fronts = [Pusher(ctx, layout.address(f"front {i}"), hello) for i in range(layout.num_fronts)]
        detokenizer = Pusher(ctx, layout.address("detokenizer 0"), hello)
        if child.config.scheduler.record is not None:
            num_tokens = workload.cache.pools[0].num_pages * workload.cache.page_size
            recorder = Recorder(Path(child.config.scheduler.record), Header(child.config, child.model, num_tokens))
            inbox, device = RecordingInbox(inbox, recorder), RecordingDevice(device, recorder)
        scheduler = Scheduler(workload, device, inbox, detokenizer, list(fronts), heartbeat, child.config.overlap_depth)
        gc.collect()
        gc.freeze()
        heartbeat.state(State.READY)
        facts: dict[str, str | int | float] = {
            "pages": workload.cache.pools[0].num_pages,
            "page_size": workload.cache.page_size,
            "max_len": workload.intake.max_len,
            "max_running_requests": workload.slots.num_slots,
        }
        for front in fronts:
            front.send(Ready(child.name, facts))
        scheduler.run(until_stopped(stop, board))
        device.close()
    except EngineError as error:
        return fail_start(child, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
