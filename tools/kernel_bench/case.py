"""What is measured: an operation on some inputs, the ways to do it, and the bytes and operations it must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from tools.kernel_bench.measure import Call, Ceilings, time_calls


def calls_of(function: Callable[..., object], inputs: Iterable[tuple]) -> list[Call]:
    """The same call on each of some sets of arguments."""
    return [partial(function, *own) for own in inputs]


@dataclass(frozen=True)
class Case:
    """One line of the table for each of `ways`."""

    op: str
    model: str
    what: str
    """The rest of the shape, such as `batch 32, context 1024, page 16`."""
    size_bytes: int
    """The fewest bytes to move: every input read once, every output written once."""
    flops: int
    ways: Mapping[str, Sequence[Call]]
    """By implementation, the same call on several sets of inputs. The engine's own choice is called `engine`."""


@dataclass(frozen=True)
class Result:
    """How long one way took."""

    op: str
    model: str
    what: str
    way: str
    seconds: float | None
    """None if it failed."""
    bound_s: float
    """The larger of the bytes' time and the operations' time at the device's ceilings."""
    size_bytes: int
    flops: int
    failure: str = ""

    @property
    def share(self) -> float:
        """Of the bound: 1 is as fast as the device's ceilings let it be."""
        return self.bound_s / self.seconds if self.seconds else 0.0


def run_case(case: Case, ceilings: Ceilings) -> list[Result]:
    """Fastest first, failures last."""
    bound = max(case.size_bytes / ceilings.bytes_per_s, case.flops / ceilings.flops_per_s)
    results = []
    for way, calls in case.ways.items():
        seconds, failure = None, ""
        try:
            seconds = time_calls(calls)
        except Exception as error:  # One way that fails must not cost the others their figures.
            failure = f"{type(error).__name__}: {error}".splitlines()[0][:150]
        results.append(
            Result(case.op, case.model, case.what, way, seconds, bound, case.size_bytes, case.flops, failure)
        )
    return sorted(results, key=lambda result: result.seconds or float("inf"))
