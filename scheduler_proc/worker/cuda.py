"""Device `cuda`: steps are put on the device's stream at launch, and their results have arrived at collect."""

from __future__ import annotations

import logging

import numpy as np
import torch

from engine.errors import DeviceLostError
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.pending import PendingStep

log = logging.getLogger(__name__)


class CudaDevice:
    """Runs steps in launch order on the current stream.

    A step that finds no memory fails alone. After other errors of the device nothing more can be asked of it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def launch(self, plan: StepPlan) -> Handle:
        try:
            return Handle(plan, pending=self.runner.launch(plan))
        except torch.OutOfMemoryError as error:
            told = str(error)
        except RuntimeError as error:
            _check_alive(error)
            raise
        # Not above: there the exception still holds what the step has made.
        torch.cuda.empty_cache()
        log.error("event=device_memory_full step=%d tokens=%d", plan.step, int(plan.q_lens.sum()))
        raise torch.OutOfMemoryError(told)

    def collect(self, handle: Handle) -> StepResult:
        assert isinstance(handle.pending, PendingStep)
        try:
            return handle.pending.result()
        except RuntimeError as error:
            _check_alive(error)
            raise

    def pages_freed(self, pages: np.ndarray) -> None:
        """Nothing to do: a page is written before it is read."""

    def close(self) -> None:
        """Let what was launched come to its end, and go of graphs: a communicator waits for those that use it."""
        torch.cuda.synchronize()
        self.runner.release()


def _check_alive(error: RuntimeError) -> None:
    """Raises DeviceLostError if the device answers with errors only, as it does after a fault in a kernel."""
    try:
        torch.cuda.synchronize()
    except RuntimeError as lost:
        raise DeviceLostError(f"the CUDA device is lost: {lost}") from error
