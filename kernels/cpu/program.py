"""Program: a forward pass recorded once and run by one call a step, as a CUDA graph is on a GPU.

What the operations of a pass have in common with every later one is all but the number of tokens and rows. So they are
recorded on buffers for the most tokens, which are then laid into one arena, each for as long as it is needed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.abi import Args, Op, op
from kernels.cpu.tree import StepTrees

_ALIGNMENT = 64


@dataclass
class _Buffer:
    """A tensor that an op writes; first and last: the ops that know it."""

    tensor: Tensor
    address: int
    end: int
    first: int = -1
    last: int = -1
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        return -(-(self.end - self.address) // _ALIGNMENT) * _ALIGNMENT


class Recording:
    """Takes the ops that are called while it is open; `finish` makes a program of them."""

    def __init__(self, max_tokens: int, max_rows: int) -> None:
        self.trees = StepTrees()
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._args: list[Args] = []
        self._buffers: list[_Buffer] = []
        """By address."""
        self._marks: list[int] = []

    @contextmanager
    def taking(self) -> Generator[None]:
        """Ops called in here are recorded, not run; what they return holds anything."""
        token = native.recorder.set(self)
        try:
            yield
        finally:
            native.recorder.reset(token)

    def add(self, args: Args, num_tokens: int, num_rows: int) -> None:
        if num_tokens != self._max_tokens or num_rows not in (0, self._max_rows):
            raise ValueError(f"an op over {num_tokens} tokens and {num_rows} rows cannot be part of a program")
        index = len(self._args)
        self._args.append(args)
        for pointer in _pointers(args):
            buffer = self._find(pointer)
            if buffer is not None:
                buffer.first = index if buffer.first < 0 else buffer.first
                buffer.last = index

    def adopt(self, tensor: Tensor) -> None:
        address = tensor.data_ptr()
        insort(self._buffers, _Buffer(tensor, address, address + tensor.nbytes), key=_address)

    def mark(self) -> None:
        """The ops so far may be run apart from those to come."""
        self._marks.append(len(self._args))

    def finish(self, *results: Tensor) -> Program:
        """The program; `results` are outputs of its ops, which it keeps until its next run."""
        outputs = [self._find(result.data_ptr()) for result in results]
        for output, result in zip(outputs, results, strict=True):
            if output is None or output.address != result.data_ptr():
                raise ValueError("the result of a program must be the output of one of its ops")
            output.last = len(self._args)
        size = _lay_out([buffer for buffer in self._buffers if buffer.first >= 0])
        whole = torch.empty(size + _ALIGNMENT, dtype=torch.uint8)
        arena = whole[-whole.data_ptr() % _ALIGNMENT :][:size]
        for args in self._args:
            self._move(args, arena.data_ptr())
        places = [
            arena[output.offset : output.offset + result.nbytes].view(result.dtype).view(result.shape)
            for output, result in zip(outputs, results, strict=True)
            if output is not None
        ]
        return Program(self._args, [*self._marks, len(self._args)], places, arena, self.trees)

    def _find(self, pointer: int) -> _Buffer | None:
        index = bisect_right(self._buffers, pointer, key=_address) - 1
        return self._buffers[index] if index >= 0 and pointer < self._buffers[index].end else None

    def _move(self, args: Args, arena: int) -> None:
        for field in args.BUFFERS:
            pointer = getattr(args, field)
            buffer = self._find(pointer) if pointer else None
            if buffer is not None:
                setattr(args, field, arena + buffer.offset + pointer - buffer.address)


class Program:
    """Recorded ops. Their inputs lie where they lay at recording; a run works on the first tokens and rows of them.

    A run whose rows add trees of drafted tokens (TreeMask) says so before, and the runs after it are without again:

        with program.trees.of(tree, q_lens):
            program.run(num_tokens, num_rows)
    """

    def __init__(
        self, args: list[Args], ends: list[int], results: list[Tensor], arena: Tensor, trees: StepTrees
    ) -> None:
        self.trees = trees
        """Read by all attention of a run; none unless set."""
        self._arena = arena
        self.results = tuple(results)
        """For the most tokens; a run writes the first of them, and the next run overwrites them."""
        self._args = args
        self._ops = (Op * len(args))(*(op(one) for one in args))
        self._ends = sorted(set(ends))

    @property
    def arena_bytes(self) -> int:
        """Memory of its own."""
        return self._arena.nbytes

    def run(self, num_tokens: int, num_rows: int) -> None:
        """Run all ops."""
        native.run(self._ops, 0, len(self._args), num_tokens, num_rows)

    def run_in_parts(self, num_tokens: int, num_rows: int, after_part: Callable[[], None]) -> None:
        """Run all ops, and call `after_part` at each mark and at the end: for what takes long."""
        begin = 0
        for end in self._ends:
            native.run(self._ops, begin, end, num_tokens, num_rows)
            after_part()
            begin = end

    def run_to_mark(self, num_tokens: int, num_rows: int) -> None:
        """Run the ops before the first mark."""
        native.run(self._ops, 0, self._ends[0], num_tokens, num_rows)


def _address(buffer: _Buffer) -> int:
    return buffer.address


def _pointers(args: Args) -> list[int]:
    return [pointer for field in args.BUFFERS if (pointer := getattr(args, field))]


def _lay_out(buffers: list[_Buffer]) -> int:
    """Give buffers offsets so that those needed at one time do not overlap; returns the bytes of the arena."""
    placed: list[_Buffer] = []
    for buffer in sorted(buffers, key=lambda one: one.first):
        offset = 0
        for other in sorted(placed, key=lambda one: one.offset):
            apart = other.last < buffer.first or offset + buffer.size_bytes <= other.offset
            if not apart:
                offset = max(offset, other.offset + other.size_bytes)
        buffer.offset = offset
        placed.append(buffer)
    return max((buffer.offset + buffer.size_bytes for buffer in placed), default=0)
