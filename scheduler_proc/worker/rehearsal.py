"""Steps of made-up requests, before there are real ones: to compile and choose kernels, and to measure memory."""

from __future__ import annotations

import numpy as np
import torch

from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.model_runner import ModelRunner

CONTEXT = 1024
"""Tokens of a made-up request where there is room for as many: what decode kernels are chosen by."""
LEAST_CHUNK = 16


class Rehearsal:
    """Made-up requests in the first slots of a runner whose pages hold nothing yet."""

    def __init__(self, runner: ModelRunner, num_pages: int, page_size: int) -> None:
        self._runner = runner
        self._num_pages = num_pages
        self._page_size = page_size
        self.max_len = runner.slots.page_table.shape[1] * page_size
        self._step = 0

    @torch.inference_mode()
    def seat(self, num_rows: int, most: int = CONTEXT) -> None:
        """Requests with contexts of CONTEXT tokens, or `most`, or as many as fit; in pages of their own if there are
        enough."""
        length = min(CONTEXT, most)
        slots = self._runner.slots
        table = slots.page_table
        # Neighbouring rows begin at different pages.
        used = -(-min(length + 1, self.max_len) // self._page_size)
        first = torch.arange(num_rows, dtype=torch.int32, device=table.device).unsqueeze(1) * used
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        table[:num_rows] = (first + columns) % self._num_pages
        slots.seq_len[:num_rows] = min(length, self.max_len - 1)
        slots.last_token[:num_rows] = 0
        slots.ended[:num_rows] = False
        slots.sampling.temperature[:num_rows] = 1.0
        slots.sampling.top_k[:num_rows] = 50
        slots.sampling.top_p[:num_rows] = 0.9

    @torch.inference_mode()
    def clear(self) -> None:
        """As if nothing had been."""
        slots = self._runner.slots
        slots.page_table.zero_()
        slots.seq_len.zero_()
        slots.last_token.zero_()
        slots.ended.zero_()
        slots.ended[slots.scratch] = True
        slots.sampling.temperature.zero_()
        slots.sampling.top_k.fill_(-1)
        slots.sampling.top_p.fill_(1.0)

    def run(self, q_lens: list[int], context: int = 0) -> None:
        """One step in which row i adds q_lens[i] tokens to `context` tokens, rows of one first, and all sample."""
        self.seat(len(q_lens), context)
        self._runner.run(self._plan(np.array(q_lens, np.int32), min(context, self.max_len - 1)))

    def _plan(self, q_lens: np.ndarray, context: int) -> StepPlan:
        # Below 0, so that no plan in earnest has the same rows_version.
        self._step -= 1
        num, num_decode = len(q_lens), int((q_lens == 1).sum()) if context else 0
        return StepPlan(
            step=self._step,
            rows=np.arange(num, dtype=np.int32),
            num_decode=num_decode,
            q_lens=q_lens,
            kv_lens=context + q_lens,
            tokens=np.zeros(int(q_lens[num_decode:].sum()), np.int32),
            sample=np.ones(num, bool),
            all_greedy=False,
            needs_filter=True,
            rows_version=self._step,
            slots_version=-1,
            joins=None,
            pages=(None,),
        )

    def chunks(self, step_tokens: int) -> list[int]:
        """Lengths of prompts that are worth a rehearsal: powers of two up to a whole step."""
        longest = min(step_tokens, self.max_len - 1)
        sizes = [LEAST_CHUNK << i for i in range(32) if LEAST_CHUNK << i < longest]
        return [*sizes, longest]
