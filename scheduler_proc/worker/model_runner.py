"""Runs one StepPlan on a model: inputs from device slots, forward, sample, score, advance the slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from engine.config import LogprobsMode
from kernels.dispatch import KernelSet
from kernels.logits import AdjustedRows
from scheduler_proc.cache.kv_pool import KVPool
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan, StepResult, TokenScores
from scheduler_proc.worker.adjustments import Adjustments
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Forward, Hidden
from scheduler_proc.worker.scores import score_in_pieces, scored_rows, spread


@dataclass
class _Rows:
    """What a step derives from its rows alone; kept while a plan's rows_version stays."""

    version: int
    slots: torch.Tensor
    """int64 [n]"""
    adjusted: AdjustedRows | None = None
    """Among the sampling rows; made when first needed."""


class ModelRunner:
    """Owns device slots and KV pages of one model; executes plans in order."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: KernelSet,
        kv_pool: KVPool,
        slots: DeviceSlots,
        forward: Forward,
        logprobs_mode: LogprobsMode = "raw",
    ) -> None:
        self.decoder = decoder
        self.kernels = kernels
        self.kv_pool = kv_pool
        self.slots = slots
        self.logprobs_mode = logprobs_mode
        self._forward = forward
        self.adjustments = Adjustments(len(slots.seq_len), decoder.spec.vocab_size, decoder.device)
        self._untold: deque[StepPlan] = deque()
        """Plans whose joins and pages the slots have not taken in."""
        self._rows = _Rows(-1, torch.zeros(0, dtype=torch.int64))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute `plan`; returns its tokens, and the logprobs it asks for, on the host."""
        slots = self.slots
        self._untold.append(plan)
        while self._untold:
            # First of all, and again if it fails: a slot whose pages were lost would write into those of others.
            self._tell(self._untold[0])
            self._untold.popleft()
        if self._rows.version != plan.rows_version:
            self._rows = _Rows(plan.rows_version, slots.upload(plan.rows, torch.int64))
        done = self._forward(plan, self._rows.slots)
        result = StepResult(np.full((len(plan.rows), 1), 0, np.int32), None, None)
        if plan.sample.any():
            self._sample(plan, done, result)
        if plan.prompt_scores:
            self._score_prompts(plan, done.states, result)
        return result

    def _tell(self, plan: StepPlan) -> None:
        """Bring the device slots up to what the plan knows of them."""
        if plan.joins is not None:
            self.slots.join(plan.joins)
            self.adjustments.join(plan.joins)
        for updates in plan.pages:
            if updates is not None:
                self.slots.set_pages(updates)

    def _sample(self, plan: StepPlan, done: Hidden, result: StepResult) -> None:
        """Draw the step's tokens, advance the slots by them, and put them into `result` with their logprobs."""
        rows, hidden, kv_lens = self._rows.slots, done.states, done.kv_lens
        if done.sampling is not None:
            rows, hidden, kv_lens = rows[done.sampling], hidden[done.last], kv_lens[done.sampling]
        logits = self.decoder.logits(hidden) if done.logits is None else done.logits
        adjusted = self._adjusted_rows(plan) if plan.adjusts_logits else None
        wanted = scored_rows(plan) if plan.logprobs is not None else None
        raw = None
        if adjusted is not None:
            if wanted is not None and self.logprobs_mode == "raw":
                raw = self._kept(plan, logits, wanted)
            self.kernels.adjust_logits(logits, kv_lens, self.adjustments.penalties, self.adjustments.edits, adjusted)
        drawn = done.likeliest if adjusted is None else None
        if drawn is None:
            drawn = self._draw(plan, logits, rows, kv_lens)
        self.kernels.advance(self.slots.last_token, rows, drawn)
        if adjusted is not None:
            self.adjustments.count(self.slots.last_token[rows], adjusted)
        host = drawn.cpu().numpy()
        if done.sampling is None:
            # A copy: the next step may write over what it was drawn into.
            result.tokens = host.reshape(-1, 1).copy()
        else:
            result.tokens[plan.sample, 0] = host
        if result.tokens.min() < 0:
            result.failed = result.tokens[:, 0] < 0
        if raw is not None:
            logits.index_copy_(0, *raw)
        if wanted is not None:
            tokens = self.slots.last_token[rows]
            result.scores = self._score_tokens(plan, logits, tokens, rows, wanted)

    def _adjusted_rows(self, plan: StepPlan) -> AdjustedRows:
        if self._rows.adjusted is None:
            self._rows.adjusted = self.adjustments.rows_of(plan.rows[plan.sample])
        return self._rows.adjusted

    def _kept(self, plan: StepPlan, logits: torch.Tensor, wanted: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows whose own logits are wanted after they were adjusted, and a copy of those logits."""
        adjusts = self.adjustments.adjusts(plan.rows[plan.sample][wanted])
        both = self.slots.upload(wanted[adjusts], torch.int64)
        return both, logits[both]

    def _draw(self, plan: StepPlan, logits: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        """int32 [s]: a token for each sampling row; -1 where the logits hold a NaN."""
        if plan.all_greedy:
            return self.kernels.argmax_rows(logits)
        slots = self.slots
        return self.kernels.sample(
            logits,
            temperature=slots.temperature[rows],
            top_k=slots.top_k[rows],
            top_p=slots.top_p[rows],
            min_p=slots.min_p[rows],
            seeds=slots.seeds[rows],
            positions=kv_lens,
            all_greedy=False,
            needs_filter=plan.needs_filter,
        )

    def _score_tokens(
        self, plan: StepPlan, logits: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor, wanted: np.ndarray
    ) -> TokenScores:
        assert plan.logprobs is not None
        index = self.slots.upload(wanted, torch.int64)
        width = int(plan.logprobs[plan.sample].max(initial=0))

        def logits_of(begin: int, end: int) -> torch.Tensor:
            piece = index[begin:end]
            own = logits[piece]
            return own if self.logprobs_mode == "raw" else self._processed(plan, own, rows[piece])

        return spread(plan, score_in_pieces(self.kernels, logits_of, tokens[index], width))

    def _processed(self, plan: StepPlan, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        slots = self.slots
        return self.kernels.processed_logits(
            logits,
            temperature=slots.temperature[rows],
            top_k=slots.top_k[rows],
            top_p=slots.top_p[rows],
            min_p=slots.min_p[rows],
            needs_filter=plan.needs_filter,
        )

    def _score_prompts(self, plan: StepPlan, hidden: torch.Tensor, result: StepResult) -> None:
        """Logprobs of prompt tokens by the model's own logits; a row with a NaN in them fails."""
        starts = np.cumsum(plan.q_lens) - plan.q_lens
        failed = np.zeros(len(plan.rows), bool)
        scores = []
        for wanted in plan.prompt_scores:
            first = int(starts[wanted.row]) + wanted.offset

            def logits_of(begin: int, end: int, first: int = first) -> torch.Tensor:
                logits = self.decoder.logits(hidden[first + begin : first + end])
                # As long a piece of work as a layer.
                self.decoder.on_layer()
                return logits

            targets = self.slots.upload(wanted.targets, torch.int64)
            found = score_in_pieces(self.kernels, logits_of, targets, wanted.width)
            failed[wanted.row] |= bool(np.isnan(found.chosen).any())
            scores.append(found)
        result.prompt_scores = tuple(scores)
        if failed.any():
            result.failed = failed if result.failed is None else result.failed | failed
