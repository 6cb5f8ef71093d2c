"""What ranks 1, 2, ... do: run the plans of rank 0 as they come, and send nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from engine.ipc.board import Heartbeat
from scheduler_proc.parallel.wire import decode_plan
from scheduler_proc.plan import Device, Handle
from scheduler_proc.record import Planned

IDLE_WAIT_S = 0.25
"""Longest sleep without a plan: how soon a stop is noticed and the heartbeat renewed."""


class Plans(Protocol):
    """Where plans come from; Puller in production."""

    def drain(self, limit: int = 4096) -> Iterable[Planned]: ...

    def wait(self, timeout_s: float) -> bool: ...


def follow(device: Device, plans: Plans, heartbeat: Heartbeat, max_in_flight: int, stopped: Callable[[], bool]) -> None:
    """Run plans until `stopped()`. Raises what a step raises: the ranks then no longer agree, so this one must end.

    max_in_flight: steps that stay launched while the next one is awaited; 0 where only `collect` runs them.
    """
    in_flight: deque[Handle] = deque()
    step = 0
    while not stopped():
        for planned in plans.drain():
            plan = decode_plan(planned.plan)
            step = plan.step
            heartbeat.beat(step, len(plan.rows))
            in_flight.append(device.launch(plan))
            while len(in_flight) > max_in_flight:
                device.collect(in_flight.popleft())
        if not in_flight:
            heartbeat.beat(step, 0)
        if plans.wait(IDLE_WAIT_S):
            continue
        while in_flight:
            device.collect(in_flight.popleft())
        heartbeat.beat(step, 0)
