"""Device `null`: instant tokens without a model, so that a benchmark sees the host alone (no torch)."""

from __future__ import annotations

import numpy as np

from scheduler_proc.plan import Handle, StepPlan, StepResult


class NullDevice:
    """Every sampling row gets a token that its length alone decides, so that outputs are reproducible."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def launch(self, plan: StepPlan) -> Handle:
        return Handle(plan)

    def collect(self, handle: Handle) -> StepResult:
        plan = handle.plan
        tokens = (plan.kv_lens * 31) % self._vocab_size
        return StepResult(tokens[:, None], None, None)

    def pages_freed(self, pages: np.ndarray) -> None:
        """Nothing to do: there is no KV."""

    def close(self) -> None:
        """Nothing to let go of."""
