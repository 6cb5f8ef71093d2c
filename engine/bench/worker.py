"""A client process: `python -m engine.bench.worker QUEUE PROGRESS PARENT`, two inherited descriptors and a process id.

It reads a Job from standard input, writes a byte to PROGRESS when it is ready and another after each request, reads the
time to start at, and writes its Outcome to standard output.
"""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys

import msgspec
import uvloop

from engine.bench.client import run_job
from engine.bench.job import Job
from engine.ipc.child import die_with_parent, raise_file_limit

READY, FINISHED = b"r", b"."
LENGTH = struct.Struct("<Q")
"""Before the Job: its bytes."""
START = struct.Struct("<d")
"""After the Job: seconds of CLOCK_MONOTONIC."""


def main(queue: int, progress: int, parent_pid: int) -> None:
    """Run one job."""
    die_with_parent(parent_pid)
    raise_file_limit()
    # The process that started this one is told too, and says when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source = sys.stdin.buffer
    (size,) = LENGTH.unpack(source.read(LENGTH.size))
    job = msgspec.msgpack.decode(source.read(size), type=Job)
    # A collection in the middle would be read as a pause of the server.
    gc.collect()
    gc.disable()

    def ready() -> float:
        os.write(progress, READY)
        return START.unpack(source.read(START.size))[0]

    def finished() -> None:
        os.write(progress, FINISHED)

    outcome = uvloop.run(run_job(job, queue, ready, finished))
    os.close(progress)
    # Not sys.stdout: with PYTHONUNBUFFERED one write is one call of the system, which may take only a part.
    with open(sys.stdout.fileno(), "wb", closefd=False) as answer:
        answer.write(msgspec.msgpack.encode(outcome))


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
