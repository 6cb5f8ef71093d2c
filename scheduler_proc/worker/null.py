"""Device `null`: instant tokens without a model, so that a benchmark sees the host alone (no torch)."""

from __future__ import annotations

import numpy as np

from scheduler_proc.plan import Handle, PromptScores, StepPlan, StepResult, TokenScores


class NullDevice:
    """Every sampling row gets a token that its length alone decides, so that outputs are reproducible.

    A token that is the n-th of its context (from 0) has the logprob -(n % 7); the most likely ones beside it are the
    token itself and those that follow it in the vocabulary, each one less likely by 1.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def launch(self, plan: StepPlan) -> Handle:
        return Handle(plan)

    def collect(self, handle: Handle) -> StepResult:
        plan = handle.plan
        tokens = (plan.kv_lens * 31) % self._vocab_size
        result = StepResult(tokens[:, None], None, None)
        if plan.logprobs is not None:
            result.scores = self._scores(plan.kv_lens, tokens, int(plan.logprobs.max()))
        if plan.prompt_scores:
            result.prompt_scores = tuple(self._prompt_scores(plan, wanted) for wanted in plan.prompt_scores)
        return result

    def pages_freed(self, pages: np.ndarray) -> None:
        """Nothing to do: there is no KV."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _prompt_scores(self, plan: StepPlan, wanted: PromptScores) -> TokenScores:
        start = int(plan.kv_lens[wanted.row] - plan.q_lens[wanted.row]) + wanted.offset + 1
        return self._scores(np.arange(start, start + len(wanted.targets)), wanted.targets, wanted.width)

    def _scores(self, positions: np.ndarray, tokens: np.ndarray, width: int) -> TokenScores:
        beside = np.arange(max(width, 0))
        chosen = -(positions % 7).astype(np.float32)
        ids = (tokens[:, None] + beside) % self._vocab_size
        return TokenScores(chosen, ids.astype(np.int32), chosen[:, None] - beside.astype(np.float32))
