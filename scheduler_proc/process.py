"""The scheduler process: one synchronous loop of receive, plan, launch, collect, send."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from engine.errors import DeviceLostError, EngineError, InternalError
from engine.ipc.board import Heartbeat
from engine.ipc.messages import (
    Abort,
    FlushCall,
    PinTokens,
    Resend,
    Stats,
    StatsCall,
    Stop,
    TokenizedRequest,
    ToScheduler,
    UnpinCall,
)
from scheduler_proc.plan import Device, Handle
from scheduler_proc.workload import GenerateWorkload

log = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
"""Longest sleep without work: how soon a stop is noticed and the heartbeat renewed."""
BLOCKED_WAIT_S = 0.01
"""Longest sleep while requests exist but none can move."""
AUDIT_EVERY_S = 5.0
"""Least seconds between two audits of a large prefix tree: whoever comes meanwhile waits for it."""
SMALL_TREE = 250
"""Nodes that are audited within milliseconds, at every idle moment."""
STATUS_EVERY_S = 10.0
"""Seconds between two status lines in the log while there is work."""


class Inbox(Protocol):
    """Where requests come from; Puller in production."""

    def drain(self, limit: int = 4096) -> Iterable[ToScheduler]: ...

    def wait(self, timeout_s: float) -> bool: ...


class Sender(Protocol):
    """Where messages go; Pusher in production."""

    def send(self, message: msgspec.Struct) -> None: ...


class StepTimes:
    """Host nanoseconds by part of the loop, summed over steps; receive counts as plan."""

    def __init__(self) -> None:
        self.plan = self.launch = self.collect = self.send = 0
        self.steps = 0


class Scheduler:
    """Drives a workload on a device. `overlap_depth` steps stay launched while the host works on older ones."""

    def __init__(
        self,
        workload: GenerateWorkload,
        device: Device,
        inbox: Inbox,
        detokenizer: Sender,
        fronts: list[Sender],
        heartbeat: Heartbeat,
        overlap_depth: int,
    ) -> None:
        self.workload = workload
        self.device = device
        self.overlap_depth = overlap_depth
        self.times = StepTimes()
        self._inbox = inbox
        self._detokenizer = detokenizer
        self._fronts = fronts
        self._heartbeat = heartbeat
        self._in_flight: deque[Handle] = deque()
        self._audited = True
        self._last_audit = -AUDIT_EVERY_S
        self._last_status = time.monotonic()
        self._status_tokens = 0

    def turn(self) -> bool:
        """One turn of the loop, without waiting for a message; False if no step was launched or collected."""
        clock = time.perf_counter_ns
        begin = clock()
        for message in self._inbox.drain():
            self._receive(message)
        workload = self.workload
        plan = workload.plan()
        planned = clock()
        if plan is not None:
            try:
                handle = self.device.launch(plan)
            except DeviceLostError:
                raise
            except Exception as error:
                workload.launch_failed(plan, error)
            else:
                workload.launched(plan)
                self._in_flight.append(handle)
        launched = clock()
        # Without a new plan nothing overlaps any more: take in the oldest step so that something can move.
        keep = self.overlap_depth if plan is not None else max(len(self._in_flight) - 1, 0)
        moved = plan is not None or bool(self._in_flight)
        while len(self._in_flight) > keep:
            self._collect(self._in_flight.popleft())
        collected = clock()
        if workload.outbox:
            self._send()
        workload.end_turn()
        self._heartbeat.beat(workload.planner.step, len(workload.requests))
        sent = clock()
        times = self.times
        times.plan += planned - begin
        times.launch += launched - planned
        times.collect += collected - launched
        times.send += sent - collected
        times.steps += plan is not None
        return moved

    @property
    def idle(self) -> bool:
        """Nothing to plan, nothing in flight, nothing to say."""
        return not (self.workload.has_work or self._in_flight or self.workload.outbox)

    def run(self, stopped: Callable[[], bool]) -> None:
        """Turn until `stopped()`; sleep on the socket while nothing can move."""
        while not stopped():
            moved = self.turn()
            if self.idle:
                self._audit_if_due()
                self._wait(IDLE_WAIT_S)
            elif not moved:
                # Held-back ends wait for the detokenizer's word, not for the device.
                self._wait(BLOCKED_WAIT_S)
            self._log_status()

    def _audit_if_due(self) -> None:
        """The audit after work, now or at a later idle moment."""
        tree, now = self.workload.cache.tree, time.monotonic()
        is_small = tree is None or tree.num_nodes <= SMALL_TREE
        if not self._audited and (is_small or now - self._last_audit >= AUDIT_EVERY_S):
            self.workload.audit_idle()
            self._audited, self._last_audit = True, time.monotonic()

    def _wait(self, timeout_s: float) -> None:
        self._inbox.wait(timeout_s)
        self._heartbeat.beat(self.workload.planner.step, len(self.workload.requests))

    def _receive(self, message: ToScheduler) -> None:
        workload = self.workload
        if isinstance(message, TokenizedRequest):
            self._audited = False
            try:
                workload.accept(message)
            except Exception as error:
                log.exception("event=accept_failed request=%d", message.request, exc_info=error)
                info = error.info() if isinstance(error, EngineError) else InternalError("internal error").info()
                workload.outbox.fail(message.request, message.attempt, message.front, info)
        elif isinstance(message, Abort):
            workload.abort(message.request, message.attempt)
        elif isinstance(message, Stop):
            workload.stop(message.request, message.attempt, message.num_tokens)
        elif isinstance(message, Resend):
            workload.resend(message.request, message.attempt, message.first_token)
        elif isinstance(message, StatsCall):
            self._fronts[message.front].send(workload.stats(message.call))
        elif isinstance(message, FlushCall | PinTokens | UnpinCall):
            self._fronts[message.front].send(workload.answer(message))

    def _collect(self, handle: Handle) -> None:
        try:
            result = self.device.collect(handle)
        except DeviceLostError:
            raise
        except Exception as error:
            self.workload.collected(handle.plan, error)
        else:
            self.workload.collected(handle.plan, result)

    def _send(self) -> None:
        """One message for all that happened; if it cannot be sent, the requests in it fail instead."""
        workload = self.workload
        output = workload.outbox.take(workload.planner.step)
        try:
            self._detokenizer.send(output)
        except Exception as error:
            workload.send_failed(output, error)
            self._detokenizer.send(workload.outbox.take(workload.planner.step))

    def _log_status(self) -> None:
        now = time.monotonic()
        workload = self.workload
        if now - self._last_status < STATUS_EVERY_S:
            return
        if not workload.has_work:
            self._last_status, self._status_tokens = now, workload.num_output_tokens
            return
        rate = (workload.num_output_tokens - self._status_tokens) / (now - self._last_status)
        stats: Stats = workload.stats(0)
        log.info(
            "event=status running=%d waiting=%d pages_used=%d pages_tree=%d pages_total=%d hit_rate=%.2f "
            "retractions=%d tok_s=%.1f step=%d%s",
            stats.running,
            stats.waiting,
            stats.pages_total - stats.pages_free - stats.pages_tree,
            stats.pages_tree,
            stats.pages_total,
            stats.cached_tokens / max(stats.prompt_tokens, 1),
            stats.retractions,
            rate,
            stats.step,
            _drafting(stats),
        )
        self._last_status, self._status_tokens = now, workload.num_output_tokens


def _drafting(stats: Stats) -> str:
    """What the status line says of drafts since the start."""
    if not stats.verified_rows:
        return ""
    length = (stats.verified_rows + stats.accepted_tokens) / stats.verified_rows
    return f" accept_len={length:.2f} drafted={stats.drafted_tokens} accepted={stats.accepted_tokens}"
