"""Paged attention by whichever of our kernel and FlashInfer's is fastest for a step of some shape."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

import triton
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cuda.attention import PagedAttention
from kernels.cuda.context import Context, is_capturing
from kernels.cuda.pages import page_lists
from kernels.flashinfer.library import FlashInfer
from kernels.flashinfer.planned import PlannedPrefill
from kernels.flashinfer.takes import Takes
from kernels.flashinfer.xqa import XqaDecode

log = logging.getLogger(__name__)

OWN = "triton"
"""Takes everything, and is what runs where nothing could be measured."""


FEW_SHORT_ROWS = 4
"""Rows of few tokens beside a step's prompts up to which those kernels are worth a try: each of them costs there what
a tile of a prompt does.
"""
PLANNED_FROM = 64
"""Tokens of a step's longest row from which a plan, made by the host at every step, may be worth its 100 to 200 us."""


class _Wrapped(Protocol):
    takes: Takes

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor: ...


class FastestAttention:
    """`kernels.attention.paged_attention`: measured at the first step of a shape, remembered by the context's tuner.

    XQA competes where every row adds the same few tokens; fa3 (fa2 before Hopper) where prompts are processed and the
    host knows the lengths of contexts. Where rows share a prefix, only our own kernel reads it once.
    """

    def __init__(self, context: Context, library: FlashInfer | None = None) -> None:
        """library: stands in for the module flashinfer. Where that cannot be imported, only our own kernel is left."""
        self._tuner = context.tuner
        self._own = PagedAttention(context)
        self._others: dict[str, _Wrapped] = {}
        try:
            self._others["flashinfer prefill"] = PlannedPrefill(context, library, page_lists)
        except ValueError as error:
            log.warning("event=flashinfer_unusable effect=attention is left to our own kernels reason=%s", error)
            return
        # Not every device has it.
        with suppress(ValueError):
            self._others["flashinfer XQA"] = XqaDecode(context, library)

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        memo_key = (self, q.shape[1:], kv.shape[3], kv.dtype, spec, lse is None)
        chosen = batch.memo.get(memo_key)
        if not isinstance(chosen, str):
            chosen = self._choose(q, kv, batch, spec, lse)
            batch.memo[memo_key] = chosen
        attend = self._own if chosen == OWN else self._others[chosen]
        return attend(q, kv, batch, spec, lse)

    def _choose(self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None) -> str:
        shares = batch.common is not None or (batch.prefix is not None and bool(batch.prefix.lens.any()))
        able = {} if shares else self._able(q, kv, batch, spec, lse)
        calls: dict[str, Callable[[], object]] = {
            name: partial(attend, q, kv, batch, spec, lse) for name, attend in able.items()
        }
        calls[OWN] = partial(self._own, q, kv, batch, spec, lse)
        longest = int(batch.q_lens.max(initial=0))
        kinds = (
            *(spec.window or 0, spec.softcap is not None, spec.sinks is not None),
            *(batch.tree is not None, lse is not None),
        )
        # What is fastest for prompts depends on little else than their length; and not every step is rehearsed.
        sizes = (longest,) if _may_be_planned(batch) else (len(batch.q_lens), len(q), longest, batch.max_kv_len)
        key = (
            *(str(q.dtype), str(kv.dtype), q.shape[1], q.shape[2], kv.shape[3], batch.page_size),
            *map(int, kinds),
            *(triton.next_power_of_2(max(size, 1)) for size in sizes),
        )
        return self._tuner.choose("attention", key, calls, OWN)

    def _able(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None
    ) -> dict[str, _Wrapped]:
        may_plan = _may_be_planned(batch)
        capturing = is_capturing(q.device)
        return {
            name: attend
            for name, attend in self._others.items()
            if (attend.takes.cuda_graph or not capturing)
            and (may_plan or not attend.takes.needs_host_lengths)
            and attend.takes.refusal(q, kv, batch, spec, lse) is None
        }


def _may_be_planned(batch: AttentionBatch) -> bool:
    """Whether a plan that the host makes may be worth while."""
    if batch.host_kv_lens is None or batch.q_starts is not None:
        return False
    num_short = int(((batch.q_lens > 0) & (batch.q_lens < PLANNED_FROM)).sum())
    return int(batch.q_lens.max(initial=0)) >= PLANNED_FROM and num_short <= FEW_SHORT_ROWS
