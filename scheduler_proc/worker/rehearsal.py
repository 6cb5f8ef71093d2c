"""Steps of made-up requests, before there are real ones: to compile and choose kernels, and to measure memory."""

from __future__ import annotations

import numpy as np
import torch

from scheduler_proc.plan import Adjustment, Joins, PromptScores, StepPlan
from scheduler_proc.worker.model_runner import ModelRunner

CONTEXT = 1024
"""Tokens of a made-up request where there is room for as many, on average: what decode kernels are chosen by."""
LEAST_CHUNK = 16
_GOLDEN = 0.6180339887
"""Its multiples, less their whole parts, lie evenly between 0 and 1 however many there are."""


class Rehearsal:
    """Made-up requests in the first slots of a runner whose pages hold nothing yet."""

    def __init__(self, runner: ModelRunner, num_pages: int, page_size: int, max_len: int) -> None:
        """max_len: tokens of a request at most."""
        self._runner = runner
        self._num_pages = num_pages
        self._page_size = page_size
        self.max_len = max_len
        self._step = 0

    @torch.inference_mode()
    def seat(self, num_rows: int, most: int | None = None) -> None:
        """Requests with contexts of all lengths around CONTEXT, as in earnest: rows of one length would all be done at
        once. With `most`, all of CONTEXT tokens or so many. No longer than leaves room for one more; in pages of their
        own if there are enough."""
        slots = self._runner.slots
        table = slots.page_table
        lengths = self._lengths(num_rows) if most is None else np.full(num_rows, min(CONTEXT, most))
        lengths = np.minimum(lengths, self.max_len - 1)
        # Neighbouring rows begin at different pages.
        used = -(-(int(lengths.max()) + 1) // self._page_size)
        first = torch.arange(num_rows, dtype=torch.int32, device=table.device).unsqueeze(1) * used
        columns = torch.arange(table.shape[1], dtype=torch.int32, device=table.device)
        table[:num_rows] = (first + columns) % self._num_pages
        slots.seq_len[:num_rows] = torch.from_numpy(lengths).to(slots.seq_len)
        slots.last_token[:num_rows] = 0
        slots.ended[:num_rows] = False
        slots.sampling.temperature[:num_rows] = 1.0
        slots.sampling.top_k[:num_rows] = 50
        slots.sampling.top_p[:num_rows] = 0.9

    @staticmethod
    def _lengths(num_rows: int) -> np.ndarray:
        """From a quarter to seven quarters of CONTEXT, evenly and in no order; one row has CONTEXT itself."""
        if num_rows == 1:
            return np.array([CONTEXT])
        spread = np.arange(num_rows) * _GOLDEN % 1.0
        return (CONTEXT * (0.25 + 1.5 * spread)).astype(np.int64)

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

    def prompts(self, q_lens: list[int], context: int = 0, num_decode: int = 0) -> None:
        """A step in which row i adds q_lens[i] tokens to `context` tokens, the first `num_decode` rows one each."""
        room = max(self.max_len - max(q_lens), 0)
        self._run(self._plan(np.array(q_lens, np.int32), min(context, CONTEXT, room), num_decode))

    def decode(self, num_rows: int) -> None:
        """A step of rows that all decode."""
        context = min(CONTEXT, self.max_len - 1)
        self._run(self._plan(np.ones(num_rows, np.int32), context, num_rows))

    def extras(self, num_rows: int) -> None:
        """What few requests ask for: changed logits, logprobs, logprobs of prompts."""
        length = min(LEAST_CHUNK, self.max_len - 1)
        plan = self._plan(np.full(num_rows, length, np.int32), 0, 0)
        plan.joins = _adjusting(num_rows)
        plan.adjusts_logits = True
        plan.logprobs = np.full(num_rows, 4, np.int32)
        if length > 1:
            plan.prompt_scores = (PromptScores(0, 0, np.zeros(length - 1, np.int32), 4),)
        self._run(plan)
        # Nobody's penalties stay.
        plan = self._plan(np.full(num_rows, length, np.int32), 0, 0)
        plan.joins = _adjusting(num_rows, is_plain=True)
        self._run(plan)

    def chunks(self, step_tokens: int) -> list[int]:
        """Lengths of prompts that are worth a rehearsal: powers of two up to a whole step."""
        longest = min(step_tokens, self.max_len - 1)
        sizes = [LEAST_CHUNK << i for i in range(32) if LEAST_CHUNK << i < longest]
        return [*sizes, max(longest, 1)]

    def _run(self, plan: StepPlan) -> None:
        num = len(plan.rows)
        self.seat(num, int((plan.kv_lens - plan.q_lens).min()))
        self._runner.run(plan)

    def _plan(self, q_lens: np.ndarray, context: int, num_decode: int) -> StepPlan:
        # Below 0, so that no plan in earnest has the same rows_version.
        self._step -= 1
        num = len(q_lens)
        return StepPlan(
            step=self._step,
            rows=np.arange(num, dtype=np.int32),
            num_decode=num_decode,
            q_lens=q_lens,
            kv_lens=(context + q_lens).astype(np.int32),
            tokens=np.zeros(int(q_lens[num_decode:].sum()), np.int32),
            sample=np.ones(num, bool),
            all_greedy=False,
            needs_filter=True,
            rows_version=self._step,
            slots_version=-1,
            joins=None,
            pages=(None,),
        )


def _adjusting(num_rows: int, *, is_plain: bool = False) -> Joins:
    """Requests that join the first slots with penalties, a bias and ends that may not come yet, or with none of it."""
    ones, ids = np.ones(num_rows, np.float32), np.zeros(1, np.int32)
    wishes = (
        Adjustment(slot, 1.1, 0.1, 0.1, ids, ids, ids, np.ones(1, np.float32), 1 << 20, ids)
        for slot in range(0 if is_plain else num_rows)
    )
    return Joins(
        slots=np.arange(num_rows, dtype=np.int32),
        context_lens=np.zeros(num_rows, np.int32),
        temperature=ones,
        top_p=0.9 * ones,
        top_k=np.full(num_rows, 50, np.int32),
        min_p=0.0 * ones,
        seeds=np.zeros(num_rows, np.int64),
        stop_ids=np.zeros((num_rows, 0), np.int32),
        adjustments=tuple(wishes),
    )
