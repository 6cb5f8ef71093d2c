"""Reads a profiler's Chrome trace: which kernels each step ran, and when the device had nothing to do.

A kernel belongs to the last `launch` of the host that began before the call that started it. Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
import statistics
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

LAUNCH, COLLECT = "launch", "collect"
"""Names of the host's spans."""
_CALLS = ("cuda_runtime", "cuda_driver")
_COPIES = ("gpu_memcpy", "gpu_memset")
_TOP = 12


@dataclass(frozen=True)
class Span:
    """Something that took time."""

    name: str
    begin: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.begin


@dataclass
class Step:
    """One launch and what it made the device do, in order of time."""

    launch: Span
    kernels: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)

    @property
    def begin(self) -> float:
        """The first kernel's."""
        return self.kernels[0].begin

    @property
    def end(self) -> float:
        """The last kernel's: not always that of the one that began last."""
        return max(kernel.end for kernel in self.kernels)


@dataclass(frozen=True)
class Trace:
    """Steps that ran kernels, in order, and what the host did."""

    steps: list[Step]
    host: list[Span]
    """Every launch and collect."""


@dataclass(frozen=True)
class Gaps:
    """Where the device's time goes over steps that follow one another; medians where not said otherwise."""

    num_steps: int
    period_us: float
    """From the start of a step's first kernel to that of the next step's."""
    busy_share: float
    """Of all the time: some kernel ran."""
    between_us: float
    """From the end of a step's last kernel to the start of the next step's first; 0 if they overlap."""
    between_most_us: float
    within_us: float
    """Between the kernels of a step, in sum."""
    kernels_per_step: float
    launch_us: float
    """The host's call."""
    top: list[tuple[str, float, float]]
    """(kernel, times a step, microseconds a step), the longest first."""


def read_trace(path: Path) -> Trace:
    """Of a file that torch.profiler wrote, .json or .json.gz."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return parse_trace(json.loads(data)["traceEvents"])


def parse_trace(events: Iterable[dict[str, Any]]) -> Trace:
    """Kernels whose start by the host is not in the trace are left out."""
    host: list[Span] = []
    called_at: dict[int, float] = {}
    device: list[tuple[int, bool, Span]] = []
    for event in events:
        category = event.get("cat")
        if event.get("ph") != "X" or category is None:
            continue
        span = Span(event["name"], float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0)))
        correlation = event.get("args", {}).get("correlation")
        if category == "user_annotation" and span.name in (LAUNCH, COLLECT):
            host.append(span)
        elif category in _CALLS and correlation is not None:
            called_at[correlation] = min(span.begin, called_at.get(correlation, span.begin))
        elif category == "kernel" or category in _COPIES:
            device.append((correlation, category == "kernel", span))
    host.sort(key=lambda span: span.begin)
    steps = [Step(span) for span in host if span.name == LAUNCH]
    begins = [step.launch.begin for step in steps]
    for correlation, is_kernel, span in sorted(device, key=lambda found: found[2].begin):
        index = bisect_right(begins, called_at.get(correlation, float("-inf"))) - 1
        if index >= 0:
            (steps[index].kernels if is_kernel else steps[index].copies).append(span)
    return Trace([step for step in steps if step.kernels], host)


def gaps_of(trace: Trace) -> Gaps | None:
    """None if there are no two steps with kernels."""
    steps = trace.steps
    if len(steps) < 2:
        return None
    begin, end = steps[0].begin, steps[-1].begin
    every = [kernel for step in steps for kernel in step.kernels]
    between = [max(after.begin - before.end, 0.0) for before, after in pairwise(steps)]
    count: Counter[str] = Counter(kernel.name for kernel in every)
    taken: dict[str, float] = defaultdict(float)
    for kernel in every:
        taken[kernel.name] += kernel.length
    longest = sorted(taken, key=lambda name: -taken[name])[:_TOP]
    return Gaps(
        num_steps=len(steps),
        period_us=statistics.median(after.begin - before.begin for before, after in pairwise(steps)),
        busy_share=busy(every, begin, end) / (end - begin),
        between_us=statistics.median(between),
        between_most_us=max(between),
        within_us=statistics.median(step.end - step.begin - busy(step.kernels, step.begin, step.end) for step in steps),
        kernels_per_step=statistics.median(len(step.kernels) for step in steps),
        launch_us=statistics.median(step.launch.length for step in steps),
        top=[(name, count[name] / len(steps), taken[name] / len(steps)) for name in longest],
    )


def busy(spans: Sequence[Span], begin: float, end: float) -> float:
    """How much of [begin, end) is covered by at least one span."""
    covered, reached = 0.0, begin
    for span in sorted(spans, key=lambda span: span.begin):
        first, last = max(span.begin, reached), min(span.end, end)
        if last > first:
            covered += last - first
            reached = last
    return covered


def describe(gaps: Gaps) -> str:
    """Lines for a terminal."""
    lines = [
        f"{gaps.num_steps} steps of {gaps.period_us:.0f} us, {gaps.kernels_per_step:g} kernels each; "
        f"the device is busy {gaps.busy_share:.1%} of the time",
        f"idle between steps {gaps.between_us:.1f} us (most {gaps.between_most_us:.1f}), "
        f"within a step {gaps.within_us:.1f} us; a launch takes the host {gaps.launch_us:.0f} us",
        f"{'us/step':>9} {'calls':>6}  kernel",
    ]
    lines += [f"{micros:>9.1f} {calls:>6.1f}  {name[:90]}" for name, calls, micros in gaps.top]
    return "\n".join(lines)
