"""Device time of calls inside a CUDA graph, over inputs too many to stay in the cache; and what the device can do."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels.cuda.timing import elapsed, time_graph

Call = Callable[[], object]

REPLAYS = 7
LEAST_CALLS = 20
"""In a graph, so that its own start does not count."""


def copies_past_cache(size_bytes: int, most: int = 64) -> int:
    """How many sets of inputs of a size outgrow the second-level cache three times."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(most, -(-3 * cache // max(size_bytes, 1))))


def time_calls(calls: Sequence[Call]) -> float:
    """Seconds of one call, the median of replays of a graph in which all calls follow one another.

    Every call has inputs of its own. Raises what a call raises.
    """
    for call in calls:
        call()
    rounds = -(-LEAST_CALLS // len(calls))
    return time_graph([*calls] * rounds, REPLAYS) / (rounds * len(calls))


def _time_eagerly(call: Call) -> float:
    """Seconds of a long call outside a graph, where a copy is a kernel; in a graph it is left to slower engines."""
    return statistics.median([elapsed(call) for _ in range(10)][2:])


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches by plain means."""

    name: str
    bytes_per_s: float
    """A copy on the device, bytes read and written."""
    flops_per_s: float
    """A bf16 product of two square matrices of 8192."""


def measure_ceilings() -> Ceilings:
    """Random data throughout: zeros are faster than anything that happens."""
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy = _time_eagerly(lambda: target.copy_(source))
    left, right = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    product = _time_eagerly(lambda: torch.mm(left, right, out=out))
    return Ceilings(torch.cuda.get_device_name(), 2 * source.nbytes / copy, 2 * 8192**3 / product)
