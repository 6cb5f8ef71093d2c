"""The forward pass of a step, called operation by operation; other ways to run it have the same contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.step import StepInputs, empty_inputs
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.step_arrays import StepArrays


@dataclass(frozen=True)
class Pages:
    """KV as a pass sees it."""

    kv: list[Tensor]
    """Per layer `[num_pages, 2, page_size, num_kv_heads, head_dim]`."""
    page_size: int
    scratch: int
    """A page that belongs to nobody."""

    @property
    def scratch_location(self) -> int:
        return self.scratch * self.page_size


@dataclass(frozen=True)
class Hidden:
    """A step's hidden states, and what came with them; valid until the next pass."""

    states: Tensor | None
    """[num_tokens, hidden]; None where only logits are kept."""
    kv_lens: Tensor
    """int64 [n]: each row's tokens, with this step's."""
    logits: Tensor | None = None
    """[n, vocab], where they came with the pass; only of steps whose rows all decode."""
    likeliest: Tensor | None = None
    """int32 [n]: argmax of the logits, where it came with the pass."""
    drawn: Tensor | None = None
    """int32 [n]: the tokens, where they were drawn with the pass and the slots have advanced by them."""


class Forward(Protocol):
    """Runs a model over a plan's tokens."""

    minds_ends: bool
    """Slots that have ended do nothing in it; else their rows go on, and the host drops what they say."""

    @property
    def logit_sizes(self) -> Sequence[int]:
        """Numbers of rows, ascending, for which logits should be made: what a library does for others may have to be
        loaded first, which takes as long as some steps. Empty: any."""
        ...

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Hidden:
        """Takes what the slots hold before the step, and advances their seq_len."""
        ...

    def room(self, num_tokens: int, num_rows: int, width: int) -> StepInputs:
        """Where `verify` wants its inputs: num_tokens tokens, num_rows rows of `width` pages or more."""
        ...

    def verify(self, inputs: StepInputs, num_rows: int, max_kv_len: int, tree: TreeMask | None) -> Tensor:
        """Hidden states [num_tokens, hidden] of rows that add as many tokens each, which are in inputs. tree: which of
        them see each other; None: each sees those before it. The slots stay as they are."""
        ...

    def release(self) -> None:
        """Let go of what was captured; nothing runs afterwards."""
        ...


class EagerForward:
    """Every operation is called from Python."""

    minds_ends = True
    logit_sizes: Sequence[int] = ()

    def __init__(self, decoder: Decoder, slots: DeviceSlots, pages: Pages, *, knows_lengths: bool = True) -> None:
        """knows_lengths: what plans say of rows' lengths is exact."""
        self._knows_lengths = knows_lengths
        self._decoder = decoder
        self._slots = slots
        self._pages = pages

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Hidden:
        pages, page_size = self._pages, self._pages.page_size
        max_kv_len = min(int(plan.kv_lens.max()), self._slots.page_table.shape[1] * page_size)
        decodes = arrays.q_starts is None
        num_tokens = len(plan.rows) if arrays.host_tokens is None else len(arrays.host_tokens)
        inputs = empty_inputs(num_tokens, len(plan.rows), -(-max_kv_len // page_size), self._slots.seq_len.device)
        self._decoder.kernels.step_inputs(
            arrays.rows,
            arrays.q_starts,
            arrays.host_tokens,
            self._slots.tensors,
            page_size,
            pages.scratch_location,
            decodes,
            inputs,
        )
        # Prompts' attention may be planned by the host, with the lengths that it knows; so none is empty there.
        host_kv_lens = plan.kv_lens if self._knows_lengths and not decodes else None
        batch = AttentionBatch(
            plan.q_lens, inputs.kv_lens, max_kv_len, inputs.page_table, page_size, host_kv_lens=host_kv_lens
        )
        if self._decoder.follower is not None:
            self._decoder.follower.expect(arrays.rows, arrays.q_starts)
        states = self._decoder.forward(inputs.tokens, inputs.positions, batch, inputs.locations, pages.kv)
        return Hidden(states, inputs.kv_lens)

    def room(self, num_tokens: int, num_rows: int, width: int) -> StepInputs:
        """See Forward."""
        return empty_inputs(num_tokens, num_rows, width, self._slots.seq_len.device)

    def verify(self, inputs: StepInputs, num_rows: int, max_kv_len: int, tree: TreeMask | None) -> Tensor:
        """See Forward."""
        q_lens = np.full(num_rows, len(inputs.tokens) // num_rows, np.int32)
        page_size = self._pages.page_size
        batch = AttentionBatch(q_lens, inputs.kv_lens, max_kv_len, inputs.page_table, page_size, tree=tree)
        return self._decoder.forward(inputs.tokens, inputs.positions, batch, inputs.locations, self._pages.kv)

    def release(self) -> None:
        """Nothing was captured."""
