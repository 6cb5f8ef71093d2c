"""Passes of drafters over packed weights, recorded as the target's are (scheduler_proc/worker/program_forward.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.cpu.program import Program, Recording

RECORDED_TOKENS = 256
"""Passes of more tokens run operation by operation: it costs little beside their work."""


class Pass(Protocol):
    """Some computation over tokens."""

    def __call__(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        """inputs: int64 [num_tokens]; states: [num_tokens, width] each; positions, batch and locations as for
        Decoder.forward. Gives [num_tokens, ...] each, valid until the next call."""
        ...


MakePass = Callable[[Pass, Sequence[int]], Pass]
"""How a pass over states of some widths is run: as it is, or recorded."""


class RecordedPass:
    """A pass as one call; its inputs are copied to where it reads them."""

    def __init__(self, work: Pass, widths: Sequence[int], max_pages: int, page_size: int) -> None:
        """work: of recordable operations alone (kernels.dispatch.can_record); widths: of the states, float32;
        max_pages: of a row."""
        self._work = work
        self._tokens, self._positions, self._locations = torch.zeros(3, RECORDED_TOKENS, dtype=torch.int64)
        self._q_lens = np.zeros(RECORDED_TOKENS, np.int32)
        self._kv_lens = torch.zeros(RECORDED_TOKENS, dtype=torch.int64)
        self._page_table = torch.zeros(RECORDED_TOKENS, max_pages, dtype=torch.int32)
        self._states = [torch.zeros(RECORDED_TOKENS, width) for width in widths]
        self._program = self._record(page_size)

    def __call__(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        """See Pass."""
        num_tokens, num_rows = len(inputs), len(batch.q_lens)
        if num_tokens > RECORDED_TOKENS or inputs.is_floating_point():
            return self._work(inputs, positions, batch, locations, states)
        self._tokens[:num_tokens] = inputs
        self._positions[:num_tokens] = positions
        self._locations[:num_tokens] = locations
        for own, given in zip(self._states, states, strict=True):
            own[:num_tokens] = given
        q_lens = self._q_lens[:num_rows]
        q_lens[:] = batch.q_lens
        self._kv_lens[:num_rows] = batch.kv_lens
        width = -(-batch.max_kv_len // batch.page_size)
        self._page_table[:num_rows, :width] = batch.page_table[:, :width]
        with self._program.trees.of(batch.tree, q_lens):
            self._program.run(num_tokens, num_rows)
        return [result[:num_tokens] for result in self._program.results]

    def _record(self, page_size: int) -> Program:
        batch = AttentionBatch(self._q_lens, self._kv_lens, 0, self._page_table, page_size)
        recording = Recording(RECORDED_TOKENS, RECORDED_TOKENS)
        with torch.inference_mode(), recording.taking():
            results = self._work(self._tokens, self._positions, batch, self._locations, self._states)
        return recording.finish(*results)
