"""Watching a scheduler's device from between them, and giving it a hard time."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from engine.ipc.messages import Abort
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Device, Handle, StepPlan, StepResult
from scheduler_proc.worker.forward import Hidden
from scheduler_proc.worker.prompt_graphs import PromptGraphs
from scheduler_proc.worker.step_arrays import StepArrays
from tests.support.scheduler import Harness

SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 3}


class Spy:
    """A device that passes calls on, and knows whose steps were launched and whose failed."""

    def __init__(self, harness: Harness) -> None:
        self._device, self._slots = harness.device, harness.slots
        self._requests: dict[int, set[int]] = {}
        self.victims: set[int] = set()
        """Requests of steps that failed."""
        harness.scheduler.device = self

    def launch(self, plan: StepPlan) -> Handle:
        occupants = (self._slots.occupant[slot] for slot in plan.rows.tolist())
        self._requests[plan.step] = {occupant.request for occupant in occupants if occupant is not None}
        with self._noted(plan):
            return self.pass_on(self._device, plan)

    def collect(self, handle: Handle) -> StepResult:
        with self._noted(handle.plan):
            return self._device.collect(handle)

    def pages_freed(self, pages: np.ndarray) -> None:
        self._device.pages_freed(pages)

    def close(self) -> None:
        self._device.close()

    def pass_on(self, device: Device, plan: StepPlan) -> Handle:
        """What a launch does; for those who want more of it."""
        return device.launch(plan)

    @contextmanager
    def _noted(self, plan: StepPlan) -> Generator[None]:
        try:
            yield
        except Exception:
            self.victims |= self._requests[plan.step]
            raise


class Crowd:
    """Requests that come, end, are cancelled, and are retracted, over a few shared prefixes."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._rng = random.Random(0)
        self._trunks = [[self._rng.randint(3, 399) for _ in range(40)] for _ in range(4)]
        self._number = 0

    def churn(self, until_step: int) -> None:
        """Until so many steps were planned, and then until nothing is left."""
        harness, rng = self._harness, self._rng
        while harness.planner.step < until_step:
            alive = [number for number in range(1, self._number + 1) if self._is_alive(number)][-16:]
            if len(alive) < 14:
                self._add()
            if alive and rng.random() < 0.05:
                harness.inbox.messages.append(Abort(rng.choice(alive), 0))
            harness.turn(rng.randint(1, 3))
        harness.run()

    def _is_alive(self, number: int) -> bool:
        return number in self._harness.workload.requests

    def _add(self) -> None:
        rng = self._rng
        self._number += 1
        prompt = [*rng.choice(self._trunks), *(rng.randint(3, 399) for _ in range(rng.randint(1, 50)))]
        kinds: list[dict[str, Any]] = [{}, SAMPLED, {"frequency_penalty": 0.5}, {"logprobs": 3}]
        self._harness.add(self._number, prompt, max_tokens=rng.randint(1, 60), **rng.choice(kinds))


class PromptFailure:
    """Once `due`, the next prompt's forward pass finds no memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.due = False
        forward = Decoder.forward

        def failing(decoder: Decoder, inputs: torch.Tensor, *rest: Any) -> torch.Tensor:
            if self.due and len(inputs) > 8:
                self.due = False
                raise torch.OutOfMemoryError("made up")
            return forward(decoder, inputs, *rest)

        replay = PromptGraphs.__call__

        def failing_replay(graphs: PromptGraphs, plan: StepPlan, arrays: StepArrays) -> Hidden:
            if self.due and len(plan.tokens) > 8:
                self.due = False
                raise torch.OutOfMemoryError("made up")
            return replay(graphs, plan, arrays)

        monkeypatch.setattr(Decoder, "forward", failing)
        monkeypatch.setattr(PromptGraphs, "__call__", failing_replay)
