"""Devices `cpu` and `delayed`: the model on the CPU, inline or in a thread."""

from __future__ import annotations

import queue
import threading

import numpy as np
import torch

from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.worker.model_runner import ModelRunner

POISON = 1.0e4
"""Finite, so that a masked position times zero stays zero; far off, so that one read of it shows in the text."""


class CpuDevice:
    """Runs a step when it is collected: launch never waits, and steps run in launch order.

    The host is the device here, so a thread would only add switches between two users of the same cores.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def launch(self, plan: StepPlan) -> Handle:
        return Handle(plan)

    def collect(self, handle: Handle) -> StepResult:
        return self._runner.run(handle.plan)

    def pages_freed(self, pages: np.ndarray) -> None:
        """Nothing to do: a page is written before it is read."""

    def close(self) -> None:
        """Nothing to let go of."""


class DelayedDevice:
    """Runs steps in a thread as soon as they are launched; their tokens are seen only at collect.

    It behaves as a GPU does: a launched step reads slots and pages at a time of its own. Freed pages are poisoned at
    once, so a page that was freed while a step still reads it changes the text, and tests see it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="delayed-device", daemon=True)
        self._thread.start()

    def launch(self, plan: StepPlan) -> Handle:
        handle = Handle(plan, threading.Event())
        self._queue.put(handle)
        return handle

    def collect(self, handle: Handle) -> StepResult:
        assert handle.done is not None
        handle.done.wait()
        if isinstance(handle.result, Exception):
            raise handle.result
        assert handle.result is not None
        return handle.result

    def pages_freed(self, pages: np.ndarray) -> None:
        self._runner.kv_pool.fill(torch.tensor(pages, dtype=torch.int64), POISON)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        while (handle := self._queue.get()) is not None:
            try:
                handle.result = self._runner.run(handle.plan)
            except Exception as error:
                handle.result = error
            assert handle.done is not None
            handle.done.set()
