"""Rank 0's device: its own, after telling the other ranks what to run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np

from engine.errors import DeviceLostError
from scheduler_proc.parallel.wire import followers_plan
from scheduler_proc.plan import Device, Handle, StepPlan, StepResult
from scheduler_proc.record import Planned, encode_plan

log = logging.getLogger(__name__)


class Follower(Protocol):
    """The way to another rank; Pusher in production."""

    def send(self, message: msgspec.Struct) -> None: ...


class LeadingDevice:
    """Sends each plan to the followers, then launches it itself.

    A step that fails is the end of this process: the followers are amid the step's collectives, and nobody can tell
    which, so there is no next step to run with them. The supervisor does the rest.
    """

    def __init__(self, device: Device, followers: Sequence[Follower]) -> None:
        self._device = device
        self._followers = followers

    def launch(self, plan: StepPlan) -> Handle:
        """Raises DeviceLostError whatever goes wrong; so does `collect`."""
        try:
            message = Planned(encode_plan(followers_plan(plan)))
            for follower in self._followers:
                follower.send(message)
            return self._device.launch(plan)
        except Exception as error:
            raise _lost(plan, error) from error

    def collect(self, handle: Handle) -> StepResult:
        try:
            return self._device.collect(handle)
        except Exception as error:
            raise _lost(handle.plan, error) from error

    def pages_freed(self, pages: np.ndarray) -> None:
        self._device.pages_freed(pages)

    def close(self) -> None:
        self._device.close()


def _lost(plan: StepPlan, error: Exception) -> DeviceLostError:
    log.error("event=step_failed step=%d effect=the ranks no longer agree", plan.step, exc_info=error)
    return DeviceLostError(f"a step failed on one of the processes that share the model: {error}")
