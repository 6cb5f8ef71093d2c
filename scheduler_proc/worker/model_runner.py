"""Runs one StepPlan on a model: inputs from device slots, forward, sample, advance the slots."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import AttentionBatch
from kernels.dispatch import KernelSet
from scheduler_proc.cache.kv_pool import KVPool
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan, StepResult
from scheduler_proc.worker.device_slots import DeviceSlots


@dataclass
class _Rows:
    """What a step derives from its rows alone; kept while a plan's rows_version stays."""

    version: int
    slots: torch.Tensor
    """int64 [n]"""


class ModelRunner:
    """Owns device slots and KV pages of one model; executes plans in order."""

    def __init__(
        self, decoder: Decoder, kernels: KernelSet, kv_pool: KVPool, slots: DeviceSlots, page_size: int
    ) -> None:
        self.decoder = decoder
        self.kernels = kernels
        self.kv_pool = kv_pool
        self.slots = slots
        self.page_size = page_size
        self._untold: deque[StepPlan] = deque()
        """Plans whose joins and pages the slots have not taken in."""
        self._rows = _Rows(-1, torch.zeros(0, dtype=torch.int64))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Execute `plan`; returns its tokens on the host."""
        slots = self.slots
        self._untold.append(plan)
        while self._untold:
            # First of all, and again if it fails: a slot whose pages were lost would write into those of others.
            self._tell(self._untold[0])
            self._untold.popleft()
        if self._rows.version != plan.rows_version:
            self._rows = _Rows(plan.rows_version, slots.upload(plan.rows, torch.int64))
        rows = self._rows.slots
        context = slots.seq_len[rows]
        if plan.num_decode == len(plan.rows):
            kv_lens = context + 1
            hidden = self._forward(plan, rows, slots.last_token[rows], context, kv_lens, row_of_token=None)
            sampled_rows, sampled_kv_lens = rows, kv_lens
        else:
            hidden, sampled_rows, sampled_kv_lens, kv_lens = self._mixed(plan, rows, context)
        slots.seq_len[rows] = kv_lens
        result = np.full((len(plan.rows), 1), 0, np.int32)
        if len(sampled_rows) == 0:
            return StepResult(result, None, None)
        tokens = self._sample(plan, hidden, sampled_rows, sampled_kv_lens)
        slots.last_token[sampled_rows] = tokens.to(torch.int64).clamp(min=0)
        result[plan.sample, 0] = tokens.cpu().numpy()
        failed = result[:, 0] < 0
        return StepResult(result, None, failed if failed.any() else None)

    def _tell(self, plan: StepPlan) -> None:
        """Bring the device slots up to what the plan knows of them."""
        if plan.joins is not None:
            self.slots.join(plan.joins)
        for updates in plan.pages:
            if updates is not None:
                self.slots.set_pages(updates)

    def _mixed(
        self, plan: StepPlan, rows: torch.Tensor, context: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Forward of a step with prompts in it; returns hidden, slots and lengths of the sampling rows, all lengths."""
        slots = self.slots
        num_rows = len(plan.rows)
        ends = np.cumsum(plan.q_lens)
        row_of_token = slots.upload(np.repeat(np.arange(num_rows), plan.q_lens), torch.int64)
        offsets = np.arange(int(ends[-1])) - np.repeat(ends - plan.q_lens, plan.q_lens)
        positions = context[row_of_token] + slots.upload(offsets, torch.int64)
        kv_lens = context + slots.upload(plan.q_lens, torch.int64)
        tokens = torch.cat([slots.last_token[rows[: plan.num_decode]], slots.upload(plan.tokens, torch.int64)])
        hidden = self._forward(plan, rows, tokens, positions, kv_lens, row_of_token)
        sampling = slots.upload(np.flatnonzero(plan.sample), torch.int64)
        last = slots.upload(ends[plan.sample] - 1, torch.int64)
        return hidden[last], rows[sampling], kv_lens[sampling], kv_lens

    def _forward(
        self,
        plan: StepPlan,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        kv_lens: torch.Tensor,
        row_of_token: torch.Tensor | None,
    ) -> torch.Tensor:
        max_kv_len = int(plan.kv_lens.max())
        table = self.slots.page_table[rows, : -(-max_kv_len // self.page_size)].to(torch.int64)
        columns = (positions // self.page_size)[:, None]
        token_table = table if row_of_token is None else table[row_of_token]
        pages = token_table.gather(1, columns)[:, 0]
        locations = pages * self.page_size + positions % self.page_size
        batch = AttentionBatch(
            q_lens=plan.q_lens,
            kv_lens=kv_lens,
            max_kv_len=max_kv_len,
            page_table=table,
            page_size=self.page_size,
        )
        return self.decoder.forward(tokens, positions, batch, locations, self.kv_pool.layers)

    def _sample(self, plan: StepPlan, hidden: torch.Tensor, rows: torch.Tensor, kv_lens: torch.Tensor) -> torch.Tensor:
        slots = self.slots
        return self.kernels.sample(
            self.decoder.logits(hidden),
            temperature=slots.temperature[rows],
            top_k=slots.top_k[rows],
            top_p=slots.top_p[rows],
            min_p=slots.min_p[rows],
            seeds=slots.seeds[rows],
            positions=kv_lens,
            all_greedy=plan.all_greedy,
            needs_filter=plan.needs_filter,
        )
