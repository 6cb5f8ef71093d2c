"""Steps that verify drafts as CUDA graphs: drafting, the pass, the draws and what the slots take of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kernels.speculative import Taken
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan
from scheduler_proc.speculative.budget import MOST_CUDA_ROWS
from scheduler_proc.speculative.verifier import Verifier
from scheduler_proc.worker.capture import Capture, Captured, Way
from scheduler_proc.worker.device_slots import DeviceSlots, SamplingTensors
from scheduler_proc.worker.forward import Forward
from scheduler_proc.worker.graph_forward import SHORT_S, Drawing, drawing_of, graph_sizes
from scheduler_proc.worker.step_arrays import StepArrays, least_size


@dataclass(frozen=True)
class Verified:
    """What a step has brought; valid until the next one."""

    taken: Taken
    logits: Tensor
    """[n * (K + 1), vocab], of all nodes."""


@dataclass(eq=False)
class _Left:
    """What a run leaves behind beside its output, for logprobs."""

    logits: Tensor
    """[size * (K + 1), vocab]"""
    way: Tensor
    """int64 [size, K + 1]"""


@dataclass(eq=False)
class _Graph:
    """Of one number of rows and drafts. Its output is Taken.numbers, int32 [size, K + 3]."""

    captured: Captured
    left: _Left


class VerifyGraphs:
    """For all numbers of drafts and of rows that steps may have, as far as no row changes its logits."""

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        verifier: Verifier,
        forward: Forward,
        max_rows: int,
        draft_sizes: tuple[int, ...],
        max_len: int,
    ) -> None:
        """forward: what runs the pass, kernel by kernel; max_len: tokens of a request at most."""
        self.sizes = graph_sizes(min(max_rows, MOST_CUDA_ROWS))
        self.draft_sizes = draft_sizes
        self._decoder = decoder
        self._slots = slots
        self._verifier = verifier
        self._forward = forward
        self._longest = max_len + draft_sizes[-1]
        device = decoder.device
        self._rows = torch.full((self.sizes[-1],), slots.scratch, dtype=torch.int64, device=device)
        self._sampling = SamplingTensors(*(values.new_zeros(self.sizes[-1]) for values in slots.sampling))
        self._graphs: dict[tuple[int, int, Drawing], _Graph] = {}
        self._last: tuple[StepArrays, int] | None = None

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Verified | None:
        """None for a step that has no graph."""
        num_rows, num_drafts = len(plan.rows), plan.num_drafts
        size = least_size(self.sizes, num_rows)
        if size is None or num_drafts not in self.draft_sizes or plan.adjusts_logits:
            return None
        graph = self._graphs[size, num_drafts, drawing_of(plan)]
        if self._last is None or self._last[0] is not arrays or self._last[1] != size:
            self._set_rows(arrays.rows, size)
            self._last = arrays, size
        graph.captured.replay()
        left = graph.left
        taken = Taken(graph.captured.output[:num_rows], left.way[:num_rows])
        return Verified(taken, left.logits[: num_rows * (num_drafts + 1)])

    def release(self) -> None:
        """Let go of all graphs."""
        self._graphs.clear()

    @torch.inference_mode()
    def capture(self, capture: Capture, prepare: Callable[[int], None], progress: Callable[[int], None]) -> None:
        """Capture everything, largest first. prepare, progress: as in GraphForward.capture."""
        done = 0
        for size in reversed(self.sizes):
            self._set_rows(torch.arange(size, device=self._rows.device), size)
            way: Way | None = None
            for num_drafts in reversed(self.draft_sizes):
                progress(done)
                way = way or self._fastest_way(size, num_drafts, capture, prepare)
                with way():
                    for drawing in Drawing:
                        key = size, num_drafts, drawing
                        if key not in self._graphs:
                            self._graphs[key] = self._captured(*key, capture, prepare)
                done += 1
        self._last = None

    def _fastest_way(self, size: int, num_drafts: int, capture: Capture, prepare: Callable[[int], None]) -> Way:
        """Of launching the steps of so many rows, whose graph is kept; long ones gain nothing from other ways than the
        usual one."""
        if len(capture.ways) == 1:
            return capture.ways[0]
        found: list[tuple[float, Way, _Graph]] = []
        for way in capture.ways:
            with way():
                graph = self._captured(size, num_drafts, Drawing.GREEDY, capture, prepare)
            found.append((capture.seconds(graph.captured, partial(prepare, size)), way, graph))
            if found[-1][0] > SHORT_S * self._decoder.spec.num_layers:
                break
        _, way, self._graphs[size, num_drafts, Drawing.GREEDY] = min(found, key=lambda one: one[0])
        return way

    @property
    def num_steps(self) -> int:
        """Of `capture`."""
        return len(self.sizes) * len(self.draft_sizes)

    def _captured(
        self, size: int, num_drafts: int, drawing: Drawing, capture: Capture, prepare: Callable[[int], None]
    ) -> _Graph:
        prepare(size)
        # Kernels are compiled, and the fastest chosen, before the capture.
        self._run(size, num_drafts, drawing)
        prepare(size)
        left = _Left(torch.empty(0), torch.empty(0))

        def run() -> Tensor:
            output, left.logits, left.way = self._run(size, num_drafts, drawing)
            return output

        captured = capture(run)
        left.logits, left.way = capture.borrowed(left.logits), capture.borrowed(left.way)
        return _Graph(Captured(captured.replay, capture.borrowed(captured.output)), left)

    def _run(self, size: int, num_drafts: int, drawing: Drawing) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and what is left behind."""
        rows, verifier = self._rows[:size], self._verifier
        nodes, states = verifier.pass_nodes(rows, num_drafts, self._longest, self._forward)
        logits, width = self._decoder.logits(states), num_drafts + 1
        kernels = self._decoder.kernels
        if drawing is Drawing.GREEDY:
            drawn = kernels.argmax_rows(logits)
        else:
            sampling = (values[:size].repeat_interleave(width) for values in self._sampling)
            needs_filter = drawing is Drawing.FILTERED
            kv_lens = nodes.kv_lens.view(-1)
            drawn = kernels.sample(logits, *sampling, kv_lens, needs_filter=needs_filter, all_greedy=False)
        taken = verifier.take(rows, nodes, drawn.view(-1, width))
        return taken.numbers, logits, taken.way

    def _set_rows(self, rows: Tensor, size: int) -> None:
        num, slots = len(rows), self._slots
        self._rows[:num] = rows
        self._rows[num:size] = slots.scratch
        for all_values, values in zip(slots.sampling, self._sampling, strict=True):
            torch.index_select(all_values, 0, self._rows[:size], out=values[:size])
