"""Host cost of the scheduler loop: steady decode steps on the `null` device, by batch and by part of the loop.

    PYTHONPATH=. python tools/bench_scheduler.py --batch 1 64 256 1024 --steps 2000 --json out.json

The real loop with the real outgoing socket; the receiver is a process that only drains. `plan` holds receiving too.
With --churn, 5% of the rows join or leave each step: 64 fresh prompt tokens and about 40 answer tokens each, with
stop strings whose ends are confirmed one step later, over a pool so small that new prompts evict old ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from engine.config import EngineConfig, SchedulerOptions
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import (
    Hello,
    RowReader,
    Stamps,
    StepOutput,
    Stop,
    TokenizedRequest,
    ToScheduler,
    pack_i32,
    schema_hash,
)
from engine.ipc.sockets import Pusher, context
from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig
from engine.sampling import SamplingParams
from scheduler_proc.build import build
from scheduler_proc.process import Scheduler, StepTimes

PROMPT_TOKENS = 64
CHURN_OUTPUT = 40
WARM_STEPS = 50
DRAIN = """
import sys, zmq
socket = zmq.Context().socket(zmq.PULL)
socket.setsockopt(zmq.RCVHWM, 0)
socket.bind(sys.argv[1])
while True:
    socket.recv()
"""


class Prepared:
    """An inbox with messages made beforehand."""

    def __init__(self, messages: list[ToScheduler]) -> None:
        self._messages = messages

    def extend(self, messages: list[ToScheduler]) -> None:
        self._messages += messages

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        messages, self._messages = self._messages, []
        yield from messages

    def wait(self, timeout_s: float) -> bool:
        return False


def model() -> ModelFiles:
    """A model the null device never looks into but for its vocabulary."""
    config = ModelConfig(
        "LlamaForCausalLM", 128_256, 4096, 14_336, 32, 32, 8, 128, 131_072, 1e-5, RopeConfig(), False, eos_ids=(2,)
    )
    return ModelFiles("null", "dummy", config, "", (), "")


def requests(batch: int, steps: int) -> list[ToScheduler]:
    """`batch` requests that decode for all of the measured steps."""
    prompt = pack_i32(range(PROMPT_TOKENS))
    sampling = SamplingParams(temperature=0.0, max_tokens=steps + WARM_STEPS + 100, ignore_eos=True, seed=1)
    return [
        TokenizedRequest(number, 0, 0, f"bench-{number}", prompt, sampling, True, b"", Stamps())
        for number in range(1, batch + 1)
    ]


class Watched:
    """The outgoing socket, and a look at what goes through it."""

    def __init__(self, pusher: Pusher) -> None:
        self._pusher = pusher
        self.last: StepOutput | None = None

    def send(self, message: msgspec.Struct) -> None:
        if isinstance(message, StepOutput):
            self.last = message
        self._pusher.send(message)


class Churn:
    """Keeps a batch full while its requests come and go; what it does is not measured."""

    def __init__(self, batch: int, inbox: Prepared, watched: Watched) -> None:
        self._rng = np.random.default_rng(0)
        self._inbox = inbox
        self._watched = watched
        self._number = 0
        self._reader = RowReader()
        inbox.extend([self._request(int(self._rng.integers(1, 2 * CHURN_OUTPUT))) for _ in range(batch)])

    def turn_done(self) -> None:
        """Confirm the held ends of the last step; a new request comes for each."""
        output, self._watched.last = self._watched.last, None
        if output is None:
            return
        for request, attempt, first, count, finish, held in self._reader.rows(output.tokens):
            if finish:
                answer = [Stop(request, attempt, first + count)] if held else []
                self._inbox.extend([*answer, self._request(int(self._rng.integers(1, 2 * CHURN_OUTPUT)))])

    def _request(self, output: int) -> TokenizedRequest:
        self._number += 1
        prompt = pack_i32(self._rng.integers(0, 100_000, PROMPT_TOKENS))
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, seed=1, stop=("never",))
        return TokenizedRequest(self._number, 0, 0, "", prompt, sampling, True, b"", Stamps())


def measure(batch: int, steps: int, depth: int, folder: Path, *, churn: bool) -> dict[str, float]:
    """One row: microseconds per step, by part."""
    lasting = batch * (PROMPT_TOKENS + steps + WARM_STEPS + 164)
    turning = batch * 2 * (PROMPT_TOKENS + CHURN_OUTPUT) + 4096
    options = SchedulerOptions(
        device="null",
        max_running_requests=batch,
        max_total_tokens=(turning if churn else lasting) + 16,
        chunked_prefill_size=batch * PROMPT_TOKENS + batch,
        overlap_depth=depth,
    )
    workload, device = build(EngineConfig(scheduler=options), model())
    board = Board(folder / f"board-{batch}", 2, create=True)
    hello = Hello("bench", schema_hash(), "")
    address = f"ipc://{folder}/sink-{batch}"
    ctx = context()
    sink = subprocess.Popen([sys.executable, "-c", DRAIN, address])
    try:
        outlet = Watched(Pusher(ctx, address, hello))
        inbox = Prepared([] if churn else requests(batch, steps))
        traffic = Churn(batch, inbox, outlet) if churn else None
        scheduler = Scheduler(workload, device, inbox, outlet, [], Heartbeat(board, 1), depth)
        while len(workload.slots.decode().rows) < batch and not churn:
            scheduler.turn()
        for _ in range(WARM_STEPS):
            scheduler.turn()
            if traffic is not None:
                traffic.turn_done()
        gc.collect()
        gc.freeze()
        scheduler.times = StepTimes()
        wall = 0
        while scheduler.times.steps < steps:
            begin = time.perf_counter_ns()
            scheduler.turn()
            wall += time.perf_counter_ns() - begin
            if traffic is not None:
                traffic.turn_done()
        times = scheduler.times
        gc.unfreeze()
    finally:
        sink.kill()
        sink.wait()
        ctx.destroy(linger=0)
    parts = {part: getattr(times, part) / steps / 1000 for part in ("plan", "launch", "collect", "send")}
    return {
        "batch": batch,
        "host_us_per_step": wall / steps / 1000,
        **parts,
        "host_us_per_token": wall / steps / 1000 / batch,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256, 1024], help="running requests")
    parser.add_argument("--steps", type=int, default=2000, help="measured steps per row")
    parser.add_argument("--depth", type=int, default=1, choices=[0, 1, 2], help="overlap depth")
    parser.add_argument("--churn", action="store_true", help="5%% of the rows join or leave each step")
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    args = parser.parse_args()
    rows = []
    print(f"{'batch':>6} {'us/step':>9} {'plan':>8} {'launch':>8} {'collect':>8} {'send':>8} {'us/token':>9}")
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for batch in args.batch:
            row = measure(batch, args.steps, args.depth, Path(folder), churn=args.churn)
            rows.append(row)
            print(
                f"{batch:>6} {row['host_us_per_step']:>9.1f} {row['plan']:>8.1f} {row['launch']:>8.1f} "
                f"{row['collect']:>8.1f} {row['send']:>8.1f} {row['host_us_per_token']:>9.3f}",
                flush=True,
            )
    if args.json:
        machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
        args.json.write_text(
            json.dumps({"rows": rows, "depth": args.depth, "churn": args.churn, "machine": machine}, indent=2)
        )


if __name__ == "__main__":
    main()
