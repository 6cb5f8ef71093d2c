"""A launched step: what is on its way to the host, and the StepResult it makes when it is there."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from scheduler_proc.plan import StepPlan, StepResult, TokenScores
from scheduler_proc.worker.scores import spread


@dataclass(frozen=True)
class PendingScores:
    """Logprobs of m tokens, as `Transfer.download` gives them: chosen float32 [m], ids int [m, k], tops float32 [m, k].

    They are filled up to `width` alternatives with token 0 at -inf.
    """

    chosen: Tensor
    ids: Tensor
    tops: Tensor
    width: int

    def arrived(self) -> TokenScores:
        num, known = self.ids.shape
        ids = np.zeros((num, self.width), np.int32)
        tops = np.full((num, self.width), -np.inf, np.float32)
        ids[:, :known] = self.ids.numpy()
        tops[:, :known] = self.tops.numpy()
        return TokenScores(self.chosen.numpy().copy(), ids, tops)


@dataclass
class PendingStep:
    """Filled while the step is launched; `result` waits."""

    plan: StepPlan
    tokens: Tensor | None = None
    """int32 [s]: what the sampling rows drew, -1 for a row whose logits held a NaN; [n, K + 1] with drafts."""
    counts: Tensor | None = None
    """int32 [n], with drafts: how many of a row's tokens are valid."""
    drafted: Tensor | None = None
    """int32 [n], with drafts: how many there were."""
    scores: PendingScores | None = None
    """Of the tokens `scored`."""
    scored: np.ndarray = field(default_factory=lambda: np.zeros(0, np.intp))
    """intp: places in the result's tokens, row after row."""
    prompt_scores: list[PendingScores] = field(default_factory=list)
    arrival: torch.cuda.Event | None = None

    def result(self) -> StepResult:
        """Wait until the step is done, and take what it has brought. Raises what the device raises."""
        if self.arrival is not None:
            self.arrival.synchronize()
        plan = self.plan
        if self.counts is not None:
            result = self._verified()
        else:
            result = StepResult(np.zeros((len(plan.rows), 1), np.int32), None, None)
        if self.tokens is not None and self.counts is None:
            result.tokens[plan.sample, 0] = self.tokens.numpy()
            if result.tokens.min() < 0:
                result.failed = result.tokens[:, 0] < 0
        if self.scores is not None:
            result.scores = spread(self.scores.arrived(), self.scored, result.tokens.size)
        if plan.prompt_scores:
            self._take_prompt_scores(result)
        return result

    def _verified(self) -> StepResult:
        """Of a step with drafts: all rows sample."""
        assert self.tokens is not None and self.counts is not None and self.drafted is not None
        tokens, counts, drafted = (part.numpy().copy() for part in (self.tokens, self.counts, self.drafted))
        failed = (tokens < 0).any(axis=1)
        return StepResult(tokens, counts, failed if failed.any() else None, drafted=drafted)

    def _take_prompt_scores(self, result: StepResult) -> None:
        """Logprobs of prompt tokens; a row with a NaN in them fails."""
        result.prompt_scores = tuple(scores.arrived() for scores in self.prompt_scores)
        failed = np.zeros(len(self.plan.rows), bool)
        for wanted, scores in zip(self.plan.prompt_scores, result.prompt_scores, strict=True):
            failed[wanted.row] |= bool(np.isnan(scores.chosen).any())
        if failed.any():
            result.failed = failed if result.failed is None else result.failed | failed
