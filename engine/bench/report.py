"""Figures of a load: rates, percentiles of the times, goodput; as structs and as lines for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from engine.bench.job import BenchError, Outcome, Record

GOALS = ("ttft", "tpot", "e2el")
_BUSY = 0.8
"""From here on a client process may be what limits the figures."""


class Times(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds; percentiles interpolate linearly."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Goodput(msgspec.Struct, frozen=True):
    """Requests that succeeded and met all of `goals_ms`."""

    goals_ms: dict[str, float]
    requests_per_s: float
    share: float
    """Of all requests, the failed ones included."""


class Summary(msgspec.Struct, frozen=True):
    """What a load gave. Tokens and times are those of the requests that succeeded; None where there is nothing."""

    duration_s: float
    """From the first request's sending to the last one's end."""
    num_ok: int
    num_failed: int
    errors: dict[str, int]
    """Failed requests by kind."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Of the input: found in the server's prefix cache."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Of input and output."""
    peak_concurrent: int
    """Most requests that were open at one moment."""
    num_other_length: int
    """Answers of another length than the one asked for."""
    ttft_ms: Times | None
    """Time to the first token."""
    tpot_ms: Times | None
    """Time per output token after the first, a value for each request."""
    itl_ms: Times | None
    """Gaps between arrivals of text, of all requests together; the most is the longest gap inside a stream."""
    e2e_ms: Times | None
    """From sending to the end of the stream."""
    goodput: Goodput | None
    """None without goals."""
    client_busy: float
    """Share of its core's time that the busiest client process used."""


def parse_goals(texts: Iterable[str]) -> dict[str, float]:
    """`ttft:200` and the like, in milliseconds. Raises ValueError for another name or no number."""
    goals = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in GOALS:
            raise ValueError(f"a goal is {', '.join(GOALS)}, not {name!r}")
        goals[name] = float(limit)
    return goals


def summarise(outcome: Outcome, asked_lens: Sequence[int], goals: dict[str, float]) -> Summary:
    """asked_lens: output tokens that the request of each index asked for. Raises BenchError without any request."""
    records = outcome.records
    if not records:
        raise BenchError("no request was made")
    good = [record for record in records if not record.error]
    duration = max(record.end for record in records) - min(record.sent for record in records)
    input_tokens = sum(record.prompt_tokens for record in good)
    output_tokens = sum(record.output_tokens for record in good)
    return Summary(
        duration_s=duration,
        num_ok=len(good),
        num_failed=len(records) - len(good),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(record.cached_tokens for record in good),
        requests_per_s=_rate(len(good), duration),
        output_tokens_per_s=_rate(output_tokens, duration),
        total_tokens_per_s=_rate(input_tokens + output_tokens, duration),
        peak_concurrent=peak_concurrent(records),
        num_other_length=sum(record.output_tokens != asked_lens[record.index] for record in good),
        ttft_ms=times([record.ttft_s for record in good]),
        tpot_ms=times([tpot for record in good if (tpot := record.tpot_s) is not None]),
        itl_ms=times([gap for record in good for gap in record.gaps_s]),
        e2e_ms=times([record.e2e_s for record in good]),
        goodput=_goodput(records, goals, duration) if goals else None,
        client_busy=outcome.busy,
    )


def times(seconds: Sequence[float]) -> Times | None:
    """None for nothing."""
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1e3
    return Times(float(ms.mean()), *(float(value) for value in np.percentile(ms, (50, 90, 99, 100))))


def peak_concurrent(records: Iterable[Record]) -> int:
    """Most requests between sending and end at one moment; one that ends as another is sent makes room first."""
    changes = sorted(change for record in records for change in ((record.sent, 1), (record.end, -1)))
    running = np.cumsum([change for _, change in changes])
    return int(running.max(initial=0))


def meets(record: Record, goals: dict[str, float]) -> bool:
    """Whether a request succeeded within all goals, given in milliseconds; one token has no time per further one."""
    if record.error:
        return False
    had = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.e2e_s}
    return all(had[name] * 1e3 <= limit for name, limit in goals.items())


def _goodput(records: Sequence[Record], goals: dict[str, float], duration: float) -> Goodput:
    met = sum(meets(record, goals) for record in records)
    return Goodput(goals, _rate(met, duration), met / len(records))


def _rate(count: float, duration: float) -> float:
    return count / duration if duration > 0 else 0.0


def describe(summary: Summary) -> str:
    """Lines for a terminal."""
    rows = [
        ("requests", f"{summary.num_ok} ok, {summary.num_failed} failed; most at a time {summary.peak_concurrent}"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("input", f"{summary.input_tokens:,} tokens, {summary.cached_tokens:,} of them cached"),
        ("output", f"{summary.output_tokens:,} tokens"),
        ("rate", f"{summary.requests_per_s:.2f} requests/s"),
        ("", f"{summary.output_tokens_per_s:,.1f} output tok/s, {summary.total_tokens_per_s:,.1f} total tok/s"),
    ]
    if good := summary.goodput:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in good.goals_ms.items())
        rows.append(("goodput", f"{good.requests_per_s:.2f} requests/s ({good.share:.1%}) within {limits} ms"))
    lines = [f"{name:<9} {text}" for name, text in rows]
    lines.append(f"{'ms':<9} " + " ".join(f"{name:>9}" for name in Times.__struct_fields__))
    for name, found in (
        ("TTFT", summary.ttft_ms),
        ("TPOT", summary.tpot_ms),
        ("ITL", summary.itl_ms),
        ("E2E", summary.e2e_ms),
    ):
        values = " ".join(f"{value:>9.2f}" for value in msgspec.structs.astuple(found)) if found else "        -"
        lines.append(f"{name:<9} {values}")
    return "\n".join([*lines, *_warnings(summary)])


def _warnings(summary: Summary) -> list[str]:
    lines = [f"failed: {count} x {kind}" for kind, count in summary.errors.items()]
    if summary.num_other_length:
        lines.append(f"note: {summary.num_other_length} answers have another length than the one asked for")
    if summary.client_busy > _BUSY:
        lines.append(
            f"note: a client process was busy {summary.client_busy:.0%} of the time and may be what limits these"
            " figures; give it more --processes"
        )
    return lines


def row(record: Record, begin: float) -> dict[str, object]:
    """A request for the JSON file: seconds since `begin`, times in milliseconds."""
    tpot = record.tpot_s
    failed = {"error": record.error, "message": record.message} if record.error else {}
    return {
        "index": record.index,
        "sent_s": round(record.sent - begin, 6),
        "ttft_ms": _ms(record.ttft_s) if record.arrivals or not record.error else None,
        "tpot_ms": None if tpot is None else _ms(tpot),
        "e2e_ms": _ms(record.e2e_s),
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens,
        "cached_tokens": record.cached_tokens,
        "chunks": record.num_chunks,
        "itl_ms": [_ms(gap) for gap in record.gaps_s],
        **failed,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
