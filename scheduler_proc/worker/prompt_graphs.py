"""Steps with prompts as CUDA graphs, where they are so short that launching kernel by kernel would take longer."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.step import StepInputs, zeroed_inputs
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.capture import Capture, Captured
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Forward, Hidden, Pages
from scheduler_proc.worker.step_arrays import StepArrays

FEW_ROWS = 16
"""Steps of so few rows have graphs of their own, where long contexts are divided among more programs."""
MANY_ROWS = 1024
"""Steps of more rows have none: one program lists the tiles of all."""
LAUNCH_BOUND = 2.0
"""Steps whose work takes less than so many times their launching are worth a graph."""
_SIZES_OF_OCTAVE = 4


def token_sizes(most: int) -> list[int]:
    """Numbers of tokens that have graphs, up to `most`: 16, 32, 64, then four to each doubling."""
    sizes = [16, 32, 64]
    while sizes[-1] < most:
        octave = sizes[-1]
        sizes += [octave + octave * part // _SIZES_OF_OCTAVE for part in range(1, _SIZES_OF_OCTAVE + 1)]
    return [size for size in sizes if size <= most]


class PromptGraphs:
    """Replays the pass of a step whose rows add different numbers of tokens, filled up to the next size.

    Tokens that fill up a step are one more row, of the scratch slot: they are written to the scratch page, and see
    nothing. How tokens divide into rows is read on the device.
    """

    minds_ends = True
    logit_sizes: Sequence[int] = ()

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        max_tokens: int,
        max_len: int,
        others: Forward,
    ) -> None:
        """max_tokens: of a step; max_len: of a request; others: runs the steps that have no graph."""
        self._decoder = decoder
        self._slots = slots
        self._pages = pages
        self._others = others
        self._max_len = max_len
        self._token_sizes = token_sizes(max_tokens)
        self._row_sizes = sorted({min(FEW_ROWS, slots.num_slots), min(MANY_ROWS, slots.num_slots)})
        self._graphs: dict[tuple[int, int], Captured] = {}
        # One row more than there are requests, for what fills up.
        max_rows, device = self._row_sizes[-1] + 1, decoder.device
        self._rows = torch.full((max_rows,), slots.scratch, dtype=torch.int64, device=device)
        self._q_starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._host_tokens = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._inputs = zeroed_inputs(max_tokens, max_rows, slots.page_table.shape[1], device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    @property
    def most_graphs(self) -> int:
        """How many there would be if all sizes were worth one."""
        return len(self._token_sizes) * len(self._row_sizes)

    def __call__(self, plan: StepPlan, arrays: StepArrays) -> Hidden:
        if arrays.host_tokens is None or arrays.q_starts is None:
            return self._others(plan, arrays)
        num_tokens, num_rows = len(arrays.host_tokens), len(plan.rows)
        size = self._size_of(num_tokens, num_rows)
        graph = None if size is None else self._graphs.get(size)
        if size is None or graph is None:
            return self._others(plan, arrays)
        self._fill(arrays.rows, arrays.q_starts, arrays.host_tokens, *size)
        graph.replay()
        return Hidden(graph.output[:num_tokens], self._inputs.kv_lens[:num_rows])

    def room(self, num_tokens: int, num_rows: int, width: int) -> StepInputs:
        """See Forward."""
        return self._others.room(num_tokens, num_rows, width)

    def verify(self, inputs: StepInputs, num_rows: int, max_kv_len: int, tree: TreeMask | None) -> Tensor:
        """See Forward."""
        return self._others.verify(inputs, num_rows, max_kv_len, tree)

    def release(self) -> None:
        self._graphs.clear()
        self._others.release()

    @torch.inference_mode()
    def capture(self, capture: Capture, seat: Callable[[int, int], None], progress: Callable[[int], None]) -> None:
        """Capture from the smallest size on, until launching is hidden behind the device's work.

        seat(rows, length): makes up requests with contexts of no more than `length` tokens in the first slots; called
        before each run. progress: told how many graphs there are.
        """
        for num_tokens in self._token_sizes:
            is_worth_while = False
            for num_rows in self._row_sizes:
                progress(len(self._graphs))
                num = min(num_rows, num_tokens)
                room = self._max_len - -(-num_tokens // num)
                if room < 0:
                    # Rows are never so long.
                    continue
                size = (num_tokens, num_rows)
                self._make_up(num, size)
                seat(num, room)
                self._run(*size)
                seat(num, room)
                launching, working = self._timed(size)
                is_worth_while |= working < LAUNCH_BOUND * launching
                seat(num, room)
                captured = capture(lambda size=size: self._run(*size))
                self._graphs[size] = Captured(captured.replay, capture.borrowed(captured.output))
            # All ranks must go on, or none.
            if not self._decoder.group.least(int(is_worth_while)):
                return

    def _make_up(self, num: int, size: tuple[int, int]) -> None:
        """Rows of about the same length in the first slots."""
        num_tokens, num_rows = size
        q_starts = np.linspace(0, num_tokens, num + 1).astype(np.int32)
        rows, starts, host_tokens = self._slots.transfer.upload_all(
            (np.arange(num), torch.int64), (q_starts, torch.int32), (np.zeros(num_tokens, np.int32), torch.int32)
        )
        self._fill(rows, starts, host_tokens, num_tokens, num_rows)

    def _timed(self, size: tuple[int, int]) -> tuple[float, float]:
        """Seconds until a pass is launched, and until it is done."""
        _wait(self._decoder.device)
        begin = time.perf_counter()
        self._run(*size)
        launched = time.perf_counter()
        _wait(self._decoder.device)
        return launched - begin, time.perf_counter() - begin

    def _run(self, num_tokens: int, num_rows: int) -> Tensor:
        """Hidden states [num_tokens, hidden]."""
        num_rows += 1
        rows, q_starts = self._rows[:num_rows], self._q_starts[: num_rows + 1]
        inputs = self._inputs.first(num_tokens, num_rows)
        self._decoder.kernels.step_inputs(
            rows,
            q_starts,
            self._host_tokens[:num_tokens],
            self._slots.tensors,
            self._pages.page_size,
            self._pages.scratch_location,
            True,
            inputs,
        )
        q_lens = np.zeros(num_rows, np.int32)
        q_lens[0] = num_tokens
        max_kv_len = inputs.page_table.shape[1] * self._pages.page_size
        batch = AttentionBatch(
            q_lens, inputs.kv_lens, max_kv_len, inputs.page_table, self._pages.page_size, q_starts=q_starts
        )
        if self._decoder.follower is not None:
            self._decoder.follower.expect(rows, q_starts)
        return self._decoder.forward(inputs.tokens, inputs.positions, batch, inputs.locations, self._pages.kv)

    def _fill(self, rows: Tensor, q_starts: Tensor, host_tokens: Tensor, num_tokens: int, num_rows: int) -> None:
        """What the next replay reads. The row behind the last one takes the tokens that fill up."""
        num = len(rows)
        self._rows[:num] = rows
        self._rows[num : num_rows + 1] = self._slots.scratch
        self._q_starts[: num + 1] = q_starts
        self._q_starts[num + 1 : num_rows + 2] = num_tokens
        self._host_tokens[: len(host_tokens)] = host_tokens

    def _size_of(self, num_tokens: int, num_rows: int) -> tuple[int, int] | None:
        """The least size with room for a step; None if there is none."""
        tokens, rows = bisect_left(self._token_sizes, num_tokens), bisect_left(self._row_sizes, num_rows)
        if tokens == len(self._token_sizes) or rows == len(self._row_sizes):
            return None
        return self._token_sizes[tokens], self._row_sizes[rows]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
