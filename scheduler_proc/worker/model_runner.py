"""Runs StepPlans on a model: inputs from device slots, forward, sample, score, advance the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from engine.config import LogprobsMode
from kernels.dispatch import KernelSet
from kernels.logits import AdjustedRows
from kernels.speculative import Taken
from scheduler_proc.cache.kv_pool import KVPool
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan, StepResult
from scheduler_proc.speculative.verifier import Verifier
from scheduler_proc.worker.adjustments import Adjustments
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Forward, Hidden
from scheduler_proc.worker.pending import PendingScores, PendingStep
from scheduler_proc.worker.scores import score_in_pieces, scored_rows
from scheduler_proc.worker.step_arrays import StepArrays, upload_arrays
from scheduler_proc.worker.verify_graphs import VerifyGraphs


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
        verifier: Verifier | None = None,
    ) -> None:
        """verifier: where plans may bring drafts."""
        self.verifier = verifier
        self.verify_graphs: VerifyGraphs | None = None
        self.decoder = decoder
        self.kernels = kernels
        self.kv_pool = kv_pool
        self.slots = slots
        self.logprobs_mode = logprobs_mode
        self.forward = forward
        self.transfer = slots.transfer
        self.adjustments = Adjustments(slots.num_slots, decoder.spec.vocab_size, slots.transfer)
        self._untold: deque[StepPlan] = deque()
        """Plans whose joins and pages the slots have not taken in."""
        self._arrays: StepArrays | None = None

    def run(self, plan: StepPlan) -> StepResult:
        """Execute `plan` and wait for its result."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingStep:
        """Execute `plan`, on a device that works beside the host without waiting for it."""
        self._untold.append(plan)
        while self._untold:
            # First of all, and again if it fails: a slot whose pages were lost would write into those of others.
            self._tell(self._untold[0])
            self._untold.popleft()
        if plan.joins is not None:
            # Once: if it fails, so do those that join, and the next ones in their slots begin anew.
            self.adjustments.join(plan.joins)
        if self._arrays is None or self._arrays.version != plan.rows_version:
            self._arrays = upload_arrays(plan, self.transfer, self.forward.logit_sizes)
        pending = PendingStep(plan)
        if plan.num_drafts:
            done = None if self.verify_graphs is None else self.verify_graphs(plan, self._arrays)
            if done is None:
                self._verify(plan, self._arrays, pending)
            else:
                self._send_taken(plan, self._arrays, done.taken, done.logits, pending)
        else:
            self._extend(plan, self._arrays, pending)
        pending.arrival = self.transfer.arrival()
        return pending

    def _extend(self, plan: StepPlan, arrays: StepArrays, pending: PendingStep) -> None:
        """A step without drafts."""
        done = self.forward(plan, arrays)
        if plan.sample.any():
            self._sample(plan, arrays, done, pending)
            # Graphs that draw have told the drafter too.
            if self.verifier is not None and done.drawn is None:
                rows = arrays.sampling_rows
                self.verifier.drafter.took(rows, self.slots.last_token[rows].to(torch.int32).unsqueeze(1))
        if plan.prompt_scores:
            self._score_prompts(plan, done, pending)

    def _verify(self, plan: StepPlan, arrays: StepArrays, pending: PendingStep) -> None:
        """A step in which every row adds drafts: draw after each of them, and take what the draws accept."""
        assert self.verifier is not None, "the plan brings drafts"
        rows = arrays.rows
        nodes, states = self.verifier.run(plan, rows, self.forward)
        size = nodes.usable.shape[1]
        logits, kv_lens = self.decoder.logits(states), nodes.kv_lens.view(-1)
        adjusted = self._adjusted_rows(plan, arrays) if plan.adjusts_logits else None
        raw = None
        if adjusted is not None:
            logits = logits.float()
            if plan.logprobs is not None and self.logprobs_mode == "raw":
                raw = self._kept(plan, logits, scored_rows(plan), size)
            penalties, of_nodes = self.adjustments.of_nodes(adjusted, nodes)
            self.kernels.adjust_logits(logits, kv_lens, penalties, self.adjustments.edits, of_nodes)
        drawn = self._draw(plan, logits, rows.repeat_interleave(size), kv_lens).view(-1, size)
        taken = self.verifier.take(rows, nodes, drawn)
        if adjusted is not None:
            self.adjustments.count_all(taken.tokens, taken.counts, adjusted)
        if raw is not None:
            logits.index_copy_(0, *raw)
        self._send_taken(plan, arrays, taken, logits, pending)

    def _send_taken(
        self, plan: StepPlan, arrays: StepArrays, taken: Taken, logits: Tensor, pending: PendingStep
    ) -> None:
        """Send what the slots have taken of their drafts, with its logprobs, on its way.

        logits: [n * (K + 1), vocab], of all nodes.
        """
        arriving = Taken(self.transfer.download(taken.numbers), taken.way)
        pending.tokens, pending.counts, pending.drafted = arriving.tokens, arriving.counts, arriving.drafted
        if plan.logprobs is not None:
            self._score_taken(plan, arrays.rows, taken, logits, pending)

    def release(self) -> None:
        """Let go of what was captured; nothing runs afterwards."""
        self.forward.release()
        if self.verify_graphs is not None:
            self.verify_graphs.release()

    def _tell(self, plan: StepPlan) -> None:
        """Bring the device slots up to what the plan knows of them."""
        if plan.joins is not None:
            self.slots.join(plan.joins)
        for updates in plan.pages:
            if updates is not None:
                self.slots.set_pages(updates)
        if plan.joins is not None and self.verifier is not None:
            self.verifier.join(plan.joins)

    def _sample(self, plan: StepPlan, arrays: StepArrays, done: Hidden, pending: PendingStep) -> None:
        """Draw the step's tokens, advance the slots by them, and send them with their logprobs on their way."""
        wanted = scored_rows(plan) if plan.logprobs is not None else None
        if done.drawn is not None and wanted is None:
            pending.tokens = self.transfer.download(done.drawn)
            return
        rows, kv_lens = arrays.sampling_rows, done.kv_lens
        if arrays.sampling is not None:
            kv_lens = kv_lens[arrays.sampling]
        logits = self._logits(arrays, done)
        adjusted = self._adjusted_rows(plan, arrays) if plan.adjusts_logits else None
        raw = None
        if adjusted is not None:
            # Rounding after each change would add up.
            logits = logits.float()
            if wanted is not None and self.logprobs_mode == "raw":
                raw = self._kept(plan, logits, wanted)
            self.kernels.adjust_logits(logits, kv_lens, self.adjustments.penalties, self.adjustments.edits, adjusted)
        drawn = done.drawn
        if drawn is None:
            drawn = done.likeliest if adjusted is None else None
            if drawn is None:
                drawn = self._draw(plan, logits, rows, kv_lens)
            # All ranks draw, and rank 0's draw counts: it alone knows what changes logits.
            self.decoder.group.broadcast(drawn)
            self._advance(rows, drawn)
        if adjusted is not None:
            self.adjustments.count(self.slots.last_token[rows], adjusted)
        pending.tokens = self.transfer.download(drawn)
        if raw is not None:
            logits.index_copy_(0, *raw)
        if wanted is not None:
            index = self.transfer.upload(wanted, torch.int64)
            slots = rows[index]
            pending.scored = np.flatnonzero(plan.sample)[wanted]
            pending.scores = self._score_drawn(plan, logits, index, self.slots.last_token[slots], slots)

    def _logits(self, arrays: StepArrays, done: Hidden) -> Tensor:
        """[s, vocab] of the sampling rows."""
        if done.logits is not None:
            return done.logits
        assert done.states is not None
        if arrays.last is None or arrays.sampling is None:
            return self.decoder.logits(done.states)
        return self.decoder.logits(done.states[arrays.last])[: len(arrays.sampling)]

    def _advance(self, rows: Tensor, drawn: Tensor) -> None:
        if self.forward.minds_ends:
            self.kernels.advance_ends(self.slots.tensors, rows, drawn)
        else:
            self.kernels.advance(self.slots.last_token, rows, drawn)

    def _adjusted_rows(self, plan: StepPlan, arrays: StepArrays) -> AdjustedRows:
        if arrays.adjusted is None:
            arrays.adjusted = self.adjustments.rows_of(plan.rows[plan.sample])
        return arrays.adjusted

    def _kept(self, plan: StepPlan, logits: Tensor, wanted: np.ndarray, size: int = 1) -> tuple[Tensor, Tensor]:
        """Logits [s * size, vocab] that are wanted as they are after they were adjusted: which, and a copy of them."""
        adjusts = self.adjustments.adjusts(plan.rows[plan.sample][wanted])
        both = wanted[adjusts]
        if size > 1:
            both = (both[:, None] * size + np.arange(size)).ravel()
        index = self.transfer.upload(both, torch.int64)
        return index, logits[index]

    def _draw(self, plan: StepPlan, logits: Tensor, rows: Tensor, kv_lens: Tensor) -> Tensor:
        """int32 [s]: a token for each sampling row; -1 where the logits hold a NaN."""
        if plan.all_greedy:
            return self.kernels.argmax_rows(logits)
        return self.kernels.sample(
            logits, *self.slots.sampling.of(rows), kv_lens, all_greedy=False, needs_filter=plan.needs_filter
        )

    def _score_taken(self, plan: StepPlan, rows: Tensor, taken: Taken, logits: Tensor, pending: PendingStep) -> None:
        """Logprobs of what `rows` (slots) have taken: each token's by the logits of the node at which it was drawn."""
        wanted = scored_rows(plan)
        index = self.transfer.upload(wanted, torch.int64)
        size = taken.way.shape[1]
        places = wanted[:, None] * size + np.arange(size)
        at = index.unsqueeze(1) * size + taken.way[index]
        tokens = taken.tokens[index].long().clamp(min=0)
        slots = rows[index].unsqueeze(1).expand_as(at)
        if at.device.type == "cpu":
            # Elsewhere the host does not know yet how many count.
            counted = torch.arange(size) < taken.counts[index].unsqueeze(1)
            places, at, tokens, slots = places[counted.numpy()], at[counted], tokens[counted], slots[counted]
        pending.scored = places.ravel()
        pending.scores = self._score_drawn(plan, logits, at.flatten(), tokens.flatten(), slots.flatten())

    def _score_drawn(
        self, plan: StepPlan, logits: Tensor, at: Tensor, tokens: Tensor, slots: Tensor
    ) -> PendingScores | None:
        """Of `tokens`, drawn for `slots` from the logits `at` (int64 [m] each)."""
        assert plan.logprobs is not None
        if not len(at):
            return None
        width = int(plan.logprobs[plan.sample].max(initial=0))

        def logits_of(begin: int, end: int) -> Tensor:
            own = logits[at[begin:end]]
            return own if self.logprobs_mode == "raw" else self._processed(plan, own, slots[begin:end])

        return self._scores_of(logits_of, tokens, width)

    def _scores_of(self, logits_of: Callable[[int, int], Tensor], tokens: Tensor, width: int) -> PendingScores:
        found = score_in_pieces(self.kernels, logits_of, tokens, width)
        chosen, ids, tops = (self.transfer.download(part) for part in found)
        return PendingScores(chosen, ids, tops, width)

    def _processed(self, plan: StepPlan, logits: Tensor, rows: Tensor) -> Tensor:
        temperature, top_k, top_p, min_p, _ = self.slots.sampling.of(rows)
        return self.kernels.processed_logits(logits, temperature, top_k, top_p, min_p, needs_filter=plan.needs_filter)

    def _score_prompts(self, plan: StepPlan, done: Hidden, pending: PendingStep) -> None:
        """Logprobs of prompt tokens by the model's own logits."""
        starts = np.cumsum(plan.q_lens) - plan.q_lens
        states = done.states
        assert states is not None
        for wanted in plan.prompt_scores:
            first = int(starts[wanted.row]) + wanted.offset

            def logits_of(begin: int, end: int, first: int = first) -> Tensor:
                logits = self.decoder.logits(states[first + begin : first + end])
                # As long a piece of work as a layer.
                self.decoder.on_layer()
                return logits

            targets = self.transfer.upload(wanted.targets, torch.int64)
            pending.prompt_scores.append(self._scores_of(logits_of, targets, wanted.width))
