"""One simulation: a trace through the scheduler that production builds, until every request has ended."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from engine.config import EngineConfig, SchedulerOptions
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import Stamps, TokenizedRequest, ToScheduler
from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig
from engine.sampling import SamplingParams
from scheduler_proc.build import build_workload
from scheduler_proc.process import Scheduler
from scheduler_proc.workload import GenerateWorkload
from tools.sim.clock import Clock
from tools.sim.cost import StepCost
from tools.sim.device import STOP_ID, VOCAB, SimDevice
from tools.sim.ledger import Ledger
from tools.sim.traces import LONGEST_ANSWER, LONGEST_CONTEXT, SimRequest

CONTEXT = LONGEST_CONTEXT + LONGEST_ANSWER
STUCK_TURNS = 1000
"""Turns without a step or an end after which the scheduler is taken to be stuck."""


class Means(msgspec.Struct):
    """Sums over virtual time, of busy and idle seconds alike."""

    seconds: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    pool: float = 0.0
    """Share of pages that running requests hold: neither free nor evictable."""
    queued_seconds: float = 0.0
    pool_queued: float = 0.0
    """The same while somebody waits: where memory is what they wait for, this should be near 1."""
    most_waiting: int = 0

    def add(self, duration_s: float, workload: GenerateWorkload) -> None:
        waiting = len(workload.planner.admission.waiting)
        self.most_waiting = max(self.most_waiting, waiting)
        cache = workload.cache
        pool = 1 - cache.available(0) / cache.pools[0].num_pages
        if waiting:
            self.queued_seconds += duration_s
            self.pool_queued += duration_s * pool
        self.seconds += duration_s
        self.running += duration_s * workload.slots.num_used
        self.waiting += duration_s * waiting
        self.pool += duration_s * pool


class Run(msgspec.Struct):
    """What a simulation leaves behind."""

    ledger: Ledger
    means: Means
    num_steps: int
    num_retractions: int
    prefilled: int
    """Prompt tokens that the device computed, again after a retraction included."""
    busy_s: float
    end_s: float
    """Virtual time at the end."""
    wall_s: float


class Arrivals:
    """An inbox whose messages come when the clock says so."""

    def __init__(self, trace: Iterable[SimRequest], clock: Clock, ledger: Ledger, unknown_up_to: int | None) -> None:
        """unknown_up_to: most tokens of prompt and answer for requests of unknown length; None = lengths are known."""
        self._trace = iter(trace)
        self._clock = clock
        self._ledger = ledger
        self._unknown_up_to = unknown_up_to
        self._next = next(self._trace, None)

    @property
    def next_s(self) -> float | None:
        """When the next request comes; None after the last."""
        return None if self._next is None else self._next.arrival_s

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        while self._next is not None and self._next.arrival_s <= self._clock.now_s:
            request = self._next
            self._next = next(self._trace, None)
            self._ledger.arrive(request, says_stop=self._unknown_up_to is not None)
            yield self._message(request)

    def wait(self, timeout_s: float) -> bool:
        return self._next is not None

    def _message(self, request: SimRequest) -> TokenizedRequest:
        max_tokens = request.answer_len
        if self._unknown_up_to is not None:
            max_tokens = min(LONGEST_ANSWER, self._unknown_up_to - len(request.prompt))
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=self._unknown_up_to is None,
            # The device's only way to know whom a slot belongs to.
            seed=request.number,
        )
        prompt = request.prompt.astype("<i4", copy=False).tobytes()
        return TokenizedRequest(request.number, 0, 0, "", prompt, sampling, True, b"", Stamps())


class _Nowhere:
    def send(self, message: msgspec.Struct) -> None:
        """No front is simulated."""


def model() -> ModelFiles:
    """What the scheduler looks at of a model: vocabulary, context and the end-of-sequence token."""
    config = ModelConfig(
        "LlamaForCausalLM", VOCAB, 4096, 14_336, 32, 32, 8, 128, CONTEXT, 1e-5, RopeConfig(), False, eos_ids=(STOP_ID,)
    )
    return ModelFiles("simulated", "dummy", config, "", (), "")


def simulate(
    trace: Iterable[SimRequest],
    num: int,
    options: SchedulerOptions,
    cost: StepCost,
    *,
    host_us: float = 0.0,
    unknown_lengths: bool = False,
) -> Run:
    """Run `num` requests to their ends. Raises RuntimeError if one fails or nothing moves any more."""
    clock = Clock()
    ledger = Ledger(clock, num)
    config = EngineConfig(scheduler=options)
    device = SimDevice(clock, cost, config.max_running_requests, ledger.stop_at, host_us / 1e6)
    num_tokens = options.max_total_tokens
    assert num_tokens is not None, "the simulator has no memory to measure: --max-total-tokens is needed"
    workload = build_workload(config, model(), num_tokens, device.pages_freed, clock=lambda: clock.now_s)
    inbox = Arrivals(trace, clock, ledger, workload.intake.max_len if unknown_lengths else None)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="sim-") as folder:
        heartbeat = Heartbeat(Board(Path(folder) / "board", 1, create=True), 0)
        scheduler = Scheduler(workload, device, inbox, ledger, [_Nowhere()], heartbeat, config.overlap_depth)
        gc.freeze()
        try:
            means = _turn_until_done(scheduler, inbox, clock, ledger)
        finally:
            gc.unfreeze()
    problems = workload.audit()
    if problems or ledger.num_finished != ledger.num_arrived:
        raise RuntimeError(f"{ledger.num_finished} of {ledger.num_arrived} requests ended; audit: {problems[:3]}")
    return Run(
        ledger,
        means,
        workload.planner.step,
        workload.planner.num_retractions,
        device.prefilled,
        device.busy_s,
        clock.now_s,
        time.perf_counter() - begin,
    )


def _turn_until_done(scheduler: Scheduler, inbox: Arrivals, clock: Clock, ledger: Ledger) -> Means:
    workload, means = scheduler.workload, Means()
    still = 0
    while True:
        before_s = clock.now_s
        moved = scheduler.turn()
        if not moved:
            if inbox.next_s is not None:
                clock.advance_to(inbox.next_s)
            elif scheduler.idle:
                return means
        still = 0 if moved or clock.now_s > before_s else still + 1
        if still > STUCK_TURNS:
            raise RuntimeError(
                f"stuck: {len(workload.planner.admission.waiting)} requests wait and no step can be planned"
            )
        means.add(clock.now_s - before_s, workload)
