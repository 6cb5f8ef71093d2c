"""The forward pass on the CPU as a program that was recorded once."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import step
from kernels.attention import AttentionBatch, TreeMask
from kernels.cpu import native
from kernels.cpu.abi import StepInputs
from kernels.cpu.program import Program, Recording
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Forward, Hidden, Pages
from scheduler_proc.worker.step_arrays import StepArrays

QUICK_TOKENS = 8
"""Steps of so few tokens show a sign of life after the pass only, not after every layer."""
PROGRAM_TOKENS = 8192
"""Steps of more tokens run operation by operation: room for them is not kept."""
HEAD_ROWS = 256
"""Steps of more rows have their logits made apart: room for them is not kept."""


class ProgramForward:
    """One call for the whole pass, on the CPU. The decoder's operations must be recordable (kernels.dispatch)."""

    minds_ends = False
    logit_sizes: Sequence[int] = ()

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        max_tokens: int,
        longer: Forward,
    ) -> None:
        """Records the pass for steps of up to `max_tokens` tokens, or PROGRAM_TOKENS; longer: runs the others."""
        max_rows, max_pages = slots.num_slots, slots.page_table.shape[1]
        max_tokens = min(max_tokens, PROGRAM_TOKENS)
        self._longer = longer
        self._decoder = decoder
        self._tokens, self._positions, self._locations = torch.zeros(3, max_tokens, dtype=torch.int64)
        self._q_lens = np.zeros(max_rows, np.int32)
        self._kv_lens = torch.zeros(max_rows, dtype=torch.int64)
        self._page_table = torch.zeros(max_rows, max_pages, dtype=torch.int32)
        self._inputs = StepInputs(
            slots.seq_len.data_ptr(),
            slots.last_token.data_ptr(),
            slots.page_table.data_ptr(),
            max_pages,
            pages.page_size,
            self._tokens.data_ptr(),
            self._positions.data_ptr(),
            self._locations.data_ptr(),
            self._q_lens.ctypes.data,
            self._kv_lens.data_ptr(),
            self._page_table.data_ptr(),
        )
        self._own_inputs = step.StepInputs(
            self._tokens, self._positions, self._locations, self._kv_lens, self._page_table
        )
        self._inputs_address = ctypes.addressof(self._inputs)
        self._views: dict[tuple[int, bool], Hidden] = {}
        self._pass = self._record_pass(pages)
        self._head = self._record_head()

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Hidden:
        num_rows = len(plan.rows)
        if plan.num_decode + len(plan.tokens) > len(self._tokens):
            return self._longer(plan, arrays)
        q_lens = np.ascontiguousarray(plan.q_lens, np.int32)
        host_tokens = np.ascontiguousarray(plan.tokens, np.int32)
        num_tokens = native.loaded().engine_cpu_step_inputs(
            self._inputs_address,
            arrays.rows.data_ptr(),
            num_rows,
            plan.num_decode,
            q_lens.ctypes.data,
            host_tokens.ctypes.data,
        )
        if num_tokens < 0:
            raise RuntimeError("a row of the step is longer than its page table")
        self._run(num_tokens, num_rows)
        if self._decoder.follower is not None:
            self._decoder.follower.expect(arrays.rows, arrays.q_starts)
            self._tell_follower(num_tokens, num_rows, int(plan.kv_lens.max()))
        if plan.num_decode < num_rows:
            return Hidden(self._pass.results[0][:num_tokens], self._kv_lens[:num_rows])
        if num_rows > HEAD_ROWS:
            return Hidden(self._pass.results[0][:num_rows], self._kv_lens[:num_rows])
        if plan.all_greedy:
            self._head.run(num_rows, num_rows)
        else:
            self._head.run_to_mark(num_rows, num_rows)
        return self._decoded(num_rows, plan.all_greedy)

    def room(self, num_tokens: int, num_rows: int, width: int) -> step.StepInputs:
        """See Forward."""
        if num_tokens > len(self._tokens) or num_rows > len(self._kv_lens):
            return self._longer.room(num_tokens, num_rows, width)
        return self._own_inputs.first(num_tokens, num_rows)

    def verify(self, inputs: step.StepInputs, num_rows: int, max_kv_len: int, tree: TreeMask | None) -> Tensor:
        """See Forward."""
        if inputs.tokens.data_ptr() != self._tokens.data_ptr():
            return self._longer.verify(inputs, num_rows, max_kv_len, tree)
        num_tokens = len(inputs.tokens)
        q_lens = self._q_lens[:num_rows]
        q_lens[:] = num_tokens // num_rows
        with self._pass.trees.of(tree, q_lens):
            self._run(num_tokens, num_rows)
        self._tell_follower(num_tokens, num_rows, max_kv_len, tree)
        return self._pass.results[0][:num_tokens]

    def release(self) -> None:
        """A program holds nothing but memory."""

    def _run(self, num_tokens: int, num_rows: int) -> None:
        if num_tokens > QUICK_TOKENS:
            self._pass.run_in_parts(num_tokens, num_rows, self._decoder.on_layer)
        else:
            self._pass.run(num_tokens, num_rows)

    def _tell_follower(self, num_tokens: int, num_rows: int, max_kv_len: int, tree: TreeMask | None = None) -> None:
        """The pass has run, and its follower, if there is one, works on what it left."""
        follower = self._decoder.follower
        if follower is None:
            return
        page_size, inputs = self._inputs.page_size, self._own_inputs.first(num_tokens, num_rows)
        max_kv_len = min(max_kv_len, inputs.page_table.shape[1] * page_size)
        batch = AttentionBatch(
            self._q_lens[:num_rows], inputs.kv_lens, max_kv_len, inputs.page_table, page_size, tree=tree
        )
        states = [result[:num_tokens] for result in self._pass.results[1:]]
        follower.follow(inputs.tokens, inputs.positions, batch, inputs.locations, states)

    def _decoded(self, num_rows: int, greedy: bool) -> Hidden:
        """Views of the programs' results; kept, for a steady step is short and a view costs microseconds."""
        known = self._views.get((num_rows, greedy))
        if known is None:
            logits, likeliest = (result[:num_rows] for result in self._head.results)
            states, kv_lens = self._pass.results[0][:num_rows], self._kv_lens[:num_rows]
            known = Hidden(states, kv_lens, logits=logits, likeliest=likeliest if greedy else None)
            self._views[num_rows, greedy] = known
        return known

    def _record_pass(self, pages: Pages) -> Program:
        """Hidden states after the last norm, and those that the follower wants."""
        batch = AttentionBatch(self._q_lens, self._kv_lens, 0, self._page_table, pages.page_size)
        recording = Recording(len(self._tokens), len(self._q_lens))
        decoder = self._decoder
        beat, decoder.on_layer = decoder.on_layer, recording.mark
        with torch.inference_mode(), recording.taking():
            hidden, states = decoder.states(self._tokens, self._positions, batch, self._locations, pages.kv)
        decoder.on_layer = beat
        return recording.finish(hidden, *states)

    def _record_head(self) -> Program:
        """Logits of the first tokens of a pass, one for each row, and after a mark their argmax."""
        max_rows = min(len(self._q_lens), HEAD_ROWS)
        recording = Recording(max_rows, max_rows)
        with torch.inference_mode(), recording.taking():
            logits = self._decoder.logits(self._pass.results[0][:max_rows])
            recording.mark()
            likeliest = self._decoder.kernels.argmax_rows(logits)
        return recording.finish(logits, likeliest)
