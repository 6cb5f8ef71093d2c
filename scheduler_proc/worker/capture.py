"""Capturing what is launched as a CUDA graph, to launch it again as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


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


class CudaCapture:
    """Graphs that share one pool of memory, so that all together need little more than the largest; they must be
    replayed one after the other, and an output be used before the next replay."""

    def __init__(self) -> None:
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
