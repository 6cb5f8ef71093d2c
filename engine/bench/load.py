"""Runs a load: starts the client processes, lets them begin at one moment, and gathers what they saw."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from engine.bench.job import BenchError, Job, Outcome
from engine.bench.worker import FINISHED, LENGTH, READY, START

_START_S = 60.0
"""A client process that is not ready by then never will be."""
_LEAD_S = 0.05
"""From the last process's readiness to the start, so that all hear of it in time."""
_LOOK_S = 0.25
"""How soon the death of a client process is noticed."""

Process = subprocess.Popen[bytes]


def run_load(job: Job, processes: int, finished: Callable[[int], None] = lambda count: None) -> Outcome:
    """Send all of a job's requests, its concurrency shared by some processes.

    finished: told how many requests more have ended. Raises BenchError if a client process fails.
    """
    num_processes = max(min(processes, job.concurrency, len(job.asks)), 1)
    with tempfile.TemporaryFile() as queue:
        queue.write(struct.pack(f"<{len(job.asks)}I", *range(len(job.asks))))
        queue.seek(0)
        with _clients(num_processes, queue.fileno()) as (clients, progress):
            for number, client in enumerate(clients):
                share = job.concurrency // num_processes + (number < job.concurrency % num_processes)
                _send(client, _framed(msgspec.structs.replace(job, concurrency=share)))
            _wait_until_ready(clients, progress)
            start = START.pack(time.monotonic() + _LEAD_S)
            for client in clients:
                _send(client, start)
            for told in _progress(clients, progress):
                finished(told.count(FINISHED))
            outcomes = [_outcome(client) for client in clients]
    records = sorted((record for outcome in outcomes for record in outcome.records), key=lambda record: record.index)
    return Outcome(records, max(outcome.busy for outcome in outcomes))


def _framed(job: Job) -> bytes:
    body = msgspec.msgpack.encode(job)
    return LENGTH.pack(len(body)) + body


@contextmanager
def _clients(count: int, queue: int) -> Generator[tuple[list[Process], int]]:
    """Client processes and the descriptor that their progress comes from; they are gone afterwards."""
    progress, theirs = os.pipe()
    clients: list[Process] = []
    try:
        clients.extend(_start(queue, theirs) for _ in range(count))
        os.close(theirs)
        theirs = -1
        yield clients, progress
    finally:
        os.close(progress)
        if theirs >= 0:
            os.close(theirs)
        for client in clients:
            client.kill()
            client.communicate()


def _start(queue: int, progress: int) -> Process:
    return subprocess.Popen(
        [sys.executable, "-m", "engine.bench.worker", str(queue), str(progress), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(queue, progress),
    )


def _send(client: Process, data: bytes) -> None:
    assert client.stdin is not None
    try:
        client.stdin.write(data)
        client.stdin.flush()
    except BrokenPipeError as error:
        raise _died(client) from error


def _wait_until_ready(clients: Sequence[Process], progress: int) -> None:
    num_ready, deadline = 0, time.monotonic() + _START_S
    for told in _progress(clients, progress):
        num_ready += told.count(READY)
        if num_ready == len(clients):
            return
        if time.monotonic() > deadline:
            raise BenchError(f"a client process was not ready within {_START_S:g} s")


def _progress(clients: Sequence[Process], progress: int) -> Iterator[bytes]:
    """What the processes tell, nothing at times, until all have closed their end. Raises BenchError if one fails."""
    while True:
        readable, _, _ = select.select([progress], [], [], _LOOK_S)
        told = os.read(progress, 65536) if readable else b""
        for client in clients:
            if client.poll():
                raise _died(client)
        if readable and not told:
            return
        yield told


def _outcome(client: Process) -> Outcome:
    output, _ = client.communicate()
    if client.returncode:
        raise _died(client)
    return msgspec.msgpack.decode(output, type=Outcome)


def _died(client: Process) -> BenchError:
    return BenchError(f"a client process ended with status {client.wait()}; what it wrote stands above")
