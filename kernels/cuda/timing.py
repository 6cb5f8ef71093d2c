"""Measuring a call on a CUDA device, with the caches cold and without the host's part."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

FLUSH_FACTOR = 3
"""Between calls so many times the second-level cache is read."""


class GraphTimer:
    """Device time of a call, in seconds: replays of a graph that holds it several times, less those without it.

    What the call reads is not in the cache before, as in a step, where weights and pages are too many to stay there.
    """

    def __init__(self, device: torch.device, calls: int = 10, replays: int = 5) -> None:
        self._device = device
        self._calls = calls
        self._replays = replays
        self._flushed: torch.Tensor | None = None
        self._empty_seconds = 0.0

    def __call__(self, call: Callable[[], object]) -> float:
        """Raises what `call` raises, also where it cannot be captured."""
        if self._flushed is None:
            size_bytes = FLUSH_FACTOR * torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flushed = torch.zeros(max(size_bytes, 1 << 20) // 4, dtype=torch.int32, device=self._device)
            self._empty_seconds = self._replayed(lambda: None)
        return max(self._replayed(call) - self._empty_seconds, 0.0) / self._calls

    def release(self) -> None:
        """Give back the memory that flushing takes; the next call takes it again."""
        self._flushed = None

    def _replayed(self, call: Callable[[], object]) -> float:
        call()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self._calls):
                self._flush()
                call()
        graph.replay()
        seconds = []
        for _ in range(self._replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(seconds)

    def _flush(self) -> None:
        assert self._flushed is not None
        # Reads only: lines that were written would have to be written back beside the call.
        torch.amax(self._flushed, dim=0)
