"""When requests come: Poisson, or Poisson in bursts, at the same mean rate."""

from __future__ import annotations

import random
from collections.abc import Iterator

ARRIVALS = ("poisson", "bursty")

CYCLE_S = 12.0
BURST_S = 3.0
"""Every cycle ends with so many seconds of burst."""
BURST_FACTOR = 3.0
"""Rate within a burst over the mean rate; between bursts it is what keeps the mean."""


def arrival_times(kind: str, rate: float, draw: random.Random) -> Iterator[float]:
    """Endless times in seconds, ascending; `rate` is requests per second in the mean."""
    return _bursty(rate, draw) if kind == "bursty" else _poisson(rate, draw)


def _poisson(rate: float, draw: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        now += draw.expovariate(rate)
        yield now


def _bursty(rate: float, draw: random.Random) -> Iterator[float]:
    # Poisson arrivals at rate 1, on a time axis stretched so that the wanted rate comes out.
    calm_s = CYCLE_S - BURST_S
    in_calm = rate * (CYCLE_S - BURST_S * BURST_FACTOR)
    arrived = 0.0
    while True:
        arrived += draw.expovariate(1.0)
        cycles, rest = divmod(arrived, rate * CYCLE_S)
        if rest < in_calm:
            yield cycles * CYCLE_S + rest * calm_s / in_calm
        else:
            yield cycles * CYCLE_S + calm_s + (rest - in_calm) / (rate * BURST_FACTOR)
