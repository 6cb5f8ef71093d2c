"""Measuring a call on a CUDA device, with the caches cold and without the host's part."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

import torch

FLUSH_FACTOR = 3
"""Between calls so many times the second-level cache is read."""
MOST_CALLS = 10
ENOUGH_SECONDS = 1e-3
"""A graph holds as many calls as take about that long, but no more than MOST_CALLS."""
REPLAYS = 5


def elapsed(call: Callable[[], object]) -> float:
    """Seconds between the device's coming to what `call` launches and its being done with it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def time_graph(calls: Iterable[Callable[[], object]], replays: int) -> float:
    """Seconds of one replay, the median of some, of a graph of all the calls in their order, on the current device.

    The calls must have run before. Raises what they raise, also where one cannot be captured.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for call in calls:
                call()
    finally:
        # A capture that failed leaves its own stream behind.
        torch.cuda.set_stream(stream)
    graph.replay()
    return statistics.median(elapsed(graph.replay) for _ in range(replays))


class GraphTimer:
    """Device time of a call, in seconds: replays of a graph that holds it several times, less those without it.

    What the call reads is not in the cache before, as in a step, where weights and pages are too many to stay there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flushed: torch.Tensor | None = None
        self._empty_seconds = 0.0

    def __call__(self, call: Callable[[], object]) -> float:
        """Raises what `call` raises, also where it cannot be captured."""
        if self._flushed is None:
            size_bytes = FLUSH_FACTOR * torch.cuda.get_device_properties(self._device).L2_cache_size
            self._flushed = torch.zeros(max(size_bytes, 1 << 20) // 4, dtype=torch.int32, device=self._device)
            self._flush()
            self._empty_seconds = time_graph([self._flush] * MOST_CALLS, REPLAYS) / MOST_CALLS
        call()
        once = elapsed(call)
        # Long calls are told apart by few.
        calls = max(1, min(MOST_CALLS, int(ENOUGH_SECONDS / max(once, 1e-7))))
        return max(time_graph([self._flush, call] * calls, REPLAYS) / calls - self._empty_seconds, 0.0)

    def let_go(self) -> None:
        """Of memory, until the next call."""
        self._flushed = None

    def _flush(self) -> None:
        assert self._flushed is not None
        # Reads only: lines that were written would have to be written back beside the call.
        torch.amax(self._flushed, dim=0)
