"""Capturing what is launched as a CUDA graph, to launch it again as one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.cuda.timing import elapsed

_TIMED_REPLAYS = 5


Way = Callable[[], AbstractContextManager[object]]
"""A state of the process that changes how kernels are launched, but not what they do."""


@dataclass(frozen=True)
class Captured:
    """Work that can be done again: on what its inputs hold then, into the same output."""

    replay: Callable[[], None]
    output: Tensor


class Capture(Protocol):
    """How work is captured."""

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        """Call `work` once, without doing it. It must have run before. Raises what it raises."""
        ...

    def borrowed(self, output: Tensor) -> Tensor:
        """The same memory, without keeping it: what is captured later may use it too."""
        ...

    def seconds(self, captured: Captured, prepare: Callable[[], None]) -> float:
        """How long a replay takes, the median of some; prepare: called before each."""
        ...

    @property
    def ways(self) -> Sequence[Way]:
        """How what is captured may be launched; the first is the usual one."""
        ...


class CudaCapture:
    """Graphs that share one pool of memory, so that all together need little more than the largest; they must be
    replayed one after the other, and an output be used before the next replay."""

    def __init__(self, ways: Sequence[Way] = (nullcontext,)) -> None:
        self.ways = ways
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = work()
            except Exception:
                _give_up(graph)
                raise
            graph.capture_end()
        return Captured(graph.replay, output)

    def seconds(self, captured: Captured, prepare: Callable[[], None]) -> float:
        found = []
        for _ in range(_TIMED_REPLAYS):
            prepare()
            found.append(elapsed(captured.replay))
        return statistics.median(found)

    def borrowed(self, output: Tensor) -> Tensor:
        assert output.is_contiguous()
        # The interface knows no bfloat16, and asks for nothing but a place and a size.
        size = output.numel() * output.element_size()
        place = _Place({"data": (output.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3})
        return torch.as_tensor(place, device=output.device).view(output.dtype).view(output.shape)


@dataclass(frozen=True)
class _Place:
    """Device memory as other libraries describe theirs to torch."""

    __cuda_array_interface__: dict[str, object]


def _give_up(graph: torch.cuda.CUDAGraph) -> None:
    """End a capture amid which something was raised, which is what the caller wants to hear of."""
    try:
        graph.capture_end()
    except RuntimeError:
        return
