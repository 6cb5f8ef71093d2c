"""Decode steps as CUDA graphs: one for the forward pass and one for drawing the tokens, for some sizes of batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, CommonPrefix, TreeMask
from kernels.step import StepInputs, zeroed_inputs
from scheduler_proc.common_prefix import LEAST_ROWS
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.capture import Capture, Captured
from scheduler_proc.worker.device_slots import DeviceSlots, SamplingTensors
from scheduler_proc.worker.forward import Forward, Hidden, Pages
from scheduler_proc.worker.step_arrays import StepArrays, least_size

_STEPS = ((0, 8, 64), (64, 16, 256), (256, 64, 1024), (1024, 256, 1 << 20))
"""(from, by how much, until): sizes grow apart as the batch does."""


_COMMON_EVERY = 64
"""Graphs that go through a common prefix once are fewer: where it pays most of the time goes into contexts, and rows
that fill up have none."""

SHORT_S = 140e-6
"""Seconds a layer of steps that are captured in more than one way: there launches count."""


class Drawing(Enum):
    """How the rows of a step draw their tokens; each has graphs of its own."""

    GREEDY = "greedy"
    PLAIN = "plain"
    FILTERED = "filtered"


def graph_sizes(max_rows: int) -> list[int]:
    """Batch sizes that have graphs: others are filled up to the next."""
    sizes = {1, 2, 4, max_rows}
    for begin, by, end in _STEPS:
        sizes.update(range(begin + by, min(end, max_rows) + 1, by))
    return sorted(size for size in sizes if size <= max_rows)


def common_sizes(max_rows: int) -> list[int]:
    """The same for steps whose rows have a prefix in common."""
    sizes = {LEAST_ROWS, 2 * LEAST_ROWS, max_rows, *range(_COMMON_EVERY, max_rows, _COMMON_EVERY)}
    return sorted(size for size in sizes if LEAST_ROWS <= size <= max_rows)


@dataclass(frozen=True)
class _Graphs:
    """Of one batch size."""

    forward: Captured
    draws: dict[Drawing, Captured]


class GraphForward:
    """Replays what was captured where all rows of a step decode and are no more than the largest size.

    The graphs read the rows' slots from a fixed place, so a step whose rows are those of the step before uploads
    nothing. Rows that fill up a batch are in the scratch slot, which has always ended.
    """

    minds_ends = True

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        max_rows: int,
        others: Forward,
        *,
        minds_common: bool = False,
        took: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        """max_rows: the largest size of batch that is captured; others: runs the other steps; minds_common: a prefix
        that rows have in common is gone through once; took: told of slots and of the tokens int32 [n, 1] that
        they have got.
        """
        self._took = took
        self.sizes = graph_sizes(max_rows)
        self.common_sizes = common_sizes(max_rows) if minds_common else []
        self._decoder = decoder
        self._slots = slots
        self._pages = pages
        self._others = others
        self._graphs: dict[int, _Graphs] = {}
        self._common_graphs: dict[int, _Graphs] = {}
        device, max_pages = decoder.device, slots.page_table.shape[1]
        self._rows = torch.full((max_rows,), slots.scratch, dtype=torch.int64, device=device)
        self._inputs = zeroed_inputs(max_rows, max_rows, max_pages, device)
        self._common = CommonPrefix(
            torch.zeros(1, max_pages, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )
        self._sampling = SamplingTensors(*(values.new_zeros(max_rows) for values in slots.sampling))
        self._last: StepArrays | None = None

    @property
    def logit_sizes(self) -> Sequence[int]:
        return self.sizes

    @property
    def num_graphs(self) -> int:
        """Of the forward pass."""
        return len(self._graphs) + len(self._common_graphs)

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Hidden:
        num = len(plan.rows)
        size = least_size(self.sizes, num) if arrays.q_starts is None else None
        if size is None:
            return self._others(plan, arrays)
        graphs = self._graphs[size]
        if arrays.common_lens is not None and (wider := least_size(self.common_sizes, num)) is not None:
            size, graphs = wider, self._common_graphs[wider]
        if self._last is not arrays:
            self._set_rows(arrays.rows, size)
            self._set_common(arrays.common_lens, arrays.leader, size)
            self._last = arrays
        graphs.forward.replay()
        kv_lens, logits = self._inputs.kv_lens[:num], graphs.forward.output[:num]
        if plan.adjusts_logits:
            return Hidden(None, kv_lens, logits=logits)
        draw = graphs.draws[drawing_of(plan)]
        draw.replay()
        return Hidden(None, kv_lens, logits=logits, drawn=draw.output[:num])

    def room(self, num_tokens: int, num_rows: int, width: int) -> StepInputs:
        """See Forward."""
        return self._others.room(num_tokens, num_rows, width)

    def verify(self, inputs: StepInputs, num_rows: int, max_kv_len: int, tree: TreeMask | None) -> Tensor:
        """See Forward."""
        return self._others.verify(inputs, num_rows, max_kv_len, tree)

    def release(self) -> None:
        self._graphs.clear()
        self._common_graphs.clear()
        self._others.release()

    @torch.inference_mode()
    def capture(self, capture: Capture, prepare: Callable[[int], None], progress: Callable[[int], None]) -> None:
        """Capture every size, largest first.

        prepare(size): seats as many made-up requests in the first slots, so that kernels are chosen by what they do in
        earnest; called again before each run. progress: told how many sizes are done.
        """
        for done, size in enumerate(reversed(self.sizes)):
            progress(done)
            self._graphs[size] = self._captured(size, capture, prepare)
        for done, size in enumerate(reversed(self.common_sizes)):
            progress(len(self.sizes) + done)
            self._common_graphs[size] = self._captured(size, capture, prepare, common=self._common)
        self._last = None

    def _captured(
        self, size: int, capture: Capture, prepare: Callable[[int], None], common: CommonPrefix | None = None
    ) -> _Graphs:
        """The fastest way; long steps have but one, for theirs gain nothing from the others."""
        self._set_rows(torch.arange(size, device=self._rows.device), size)
        best: tuple[float, _Graphs] | None = None
        for way in capture.ways:
            with way():
                graphs = self._captured_in(size, capture, prepare, common)
            # A step makes its rows longer: without preparing, the replays would lead beyond the longest request.
            seconds = capture.seconds(graphs.forward, partial(prepare, size)) if len(capture.ways) > 1 else 0.0
            if best is None or seconds < best[0]:
                best = seconds, graphs
            if seconds > SHORT_S * self._decoder.spec.num_layers:
                break
        assert best is not None
        return best[1]

    def _captured_in(
        self, size: int, capture: Capture, prepare: Callable[[int], None], common: CommonPrefix | None
    ) -> _Graphs:
        def run() -> Tensor:
            return self._run(size, common)

        prepare(size)
        if common is not None:
            # As when half of the shortest context is common.
            half = int(self._slots.seq_len[:size].min()) // (2 * self._pages.page_size) * self._pages.page_size
            self._set_common(common.lens.new_full((size,), half), 0, size)
        logits = run()
        for drawing in Drawing:
            # Kernels are compiled, and the fastest chosen, before the capture.
            self._draw(size, drawing, logits)
        del logits
        prepare(size)
        forward = capture(run)
        draws = {drawing: capture(lambda d=drawing: self._draw(size, d, forward.output)) for drawing in Drawing}
        return _Graphs(
            Captured(forward.replay, capture.borrowed(forward.output)),
            {drawing: Captured(draw.replay, capture.borrowed(draw.output)) for drawing, draw in draws.items()},
        )

    def _run(self, size: int, common: CommonPrefix | None) -> Tensor:
        """Logits [size, vocab] of the first `size` rows."""
        inputs = self._inputs.first(size, size)
        self._decoder.kernels.step_inputs(
            self._rows[:size],
            None,
            None,
            self._slots.tensors,
            self._pages.page_size,
            self._pages.scratch_location,
            True,
            inputs,
        )
        max_kv_len = inputs.page_table.shape[1] * self._pages.page_size
        batch = AttentionBatch(
            np.ones(size, np.int32),
            inputs.kv_lens,
            max_kv_len,
            inputs.page_table,
            self._pages.page_size,
            common=None if common is None else CommonPrefix(common.page_table, common.lens[:size]),
        )
        if self._decoder.follower is not None:
            self._decoder.follower.expect(self._rows[:size], None)
        states = self._decoder.forward(inputs.tokens, inputs.positions, batch, inputs.locations, self._pages.kv)
        return self._decoder.logits(states)

    def _draw(self, size: int, drawing: Drawing, logits: Tensor) -> Tensor:
        """int32 [size]: the tokens, which the slots have advanced by."""
        kernels = self._decoder.kernels
        if drawing is Drawing.GREEDY:
            drawn = kernels.argmax_rows(logits)
        else:
            drawn = kernels.sample(
                logits,
                *self._sampling.of(slice(size)),
                self._inputs.kv_lens[:size],
                needs_filter=drawing is Drawing.FILTERED,
                all_greedy=False,
            )
        self._decoder.group.broadcast(drawn)
        kernels.advance_ends(self._slots.tensors, self._rows[:size], drawn)
        if self._took is not None:
            self._took(self._rows[:size], drawn.unsqueeze(1))
        return drawn

    def _set_rows(self, rows: Tensor, size: int) -> None:
        """Which slots the next steps are of, and how those draw."""
        num, slots = len(rows), self._slots
        self._rows[:num] = rows
        self._rows[num:size] = slots.scratch
        for all_values, values in zip(slots.sampling, self._sampling, strict=True):
            torch.index_select(all_values, 0, self._rows[:size], out=values[:size])

    def _set_common(self, lens: Tensor | None, leader: int, size: int) -> None:
        """What the next steps' rows have in common, in the pages of the slot `leader`. They are copied: that slot may
        end before the others, but nobody else gets the pages while others use them."""
        if lens is None:
            return
        self._common.lens[: len(lens)] = lens
        self._common.lens[len(lens) : size] = 0
        self._common.page_table.copy_(self._slots.page_table[leader : leader + 1])


def drawing_of(plan: StepPlan) -> Drawing:
    """Of a step's rows together."""
    if plan.all_greedy:
        return Drawing.GREEDY
    return Drawing.FILTERED if plan.needs_filter else Drawing.PLAIN
