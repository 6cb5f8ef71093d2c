"""The numbers of one run, and how people read them."""

from __future__ import annotations

import msgspec
import numpy as np

from tools.sim.run import Run


class Summary(msgspec.Struct, frozen=True):
    """One row of the report. Times in milliseconds unless the name says otherwise; shares are 0..1."""

    trace: str
    arrivals: str
    rate: float
    policy: str
    requests: int
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    itl_largest: float
    e2e_p50: float
    e2e_p99: float
    output_tok_s: float
    hit_rate: float
    """Cached over all prompt tokens, at each request's first admission."""
    goodput: float
    """Requests per second that met both objectives."""
    within_slo: float
    retractions: int
    recomputed: float
    """Prompt tokens computed because of retractions or lost chunks, over all prompt tokens."""
    running: float
    waiting: float
    most_waiting: int
    pool: float
    """Share of pages that running requests held."""
    pool_queued: float
    """The same while somebody waited; 0 if nobody did."""
    busy: float
    """Share of the time that the device worked."""
    duration_s: float
    steps: int
    wall_s: float
    steps_per_s: float
    """Simulated steps per second of wall time."""


COLUMNS = (
    ("policy", "policy", "{:>10}"),
    ("rate", "rate", "{:>6.1f}"),
    ("ttft_p50", "ttft50", "{:>8.0f}"),
    ("ttft_p99", "ttft99", "{:>8.0f}"),
    ("itl_p50", "itl50", "{:>6.1f}"),
    ("itl_p99", "itl99", "{:>6.1f}"),
    ("itl_largest", "gap", "{:>7.0f}"),
    ("e2e_p50", "e2e50", "{:>7.0f}"),
    ("e2e_p99", "e2e99", "{:>8.0f}"),
    ("output_tok_s", "tok/s", "{:>7.0f}"),
    ("hit_rate", "hit", "{:>5.3f}"),
    ("goodput", "good/s", "{:>6.2f}"),
    ("within_slo", "slo", "{:>5.3f}"),
    ("retractions", "retr", "{:>5d}"),
    ("running", "run", "{:>5.0f}"),
    ("waiting", "wait", "{:>6.0f}"),
    ("pool", "pool", "{:>5.2f}"),
    ("pool_queued", "poolq", "{:>5.2f}"),
    ("wall_s", "wall s", "{:>6.1f}"),
    ("steps_per_s", "steps/s", "{:>8.0f}"),
)
"""(field, heading, format)"""


def summarise(
    run: Run, *, trace: str, arrivals: str, rate: float, policy: str, slo_ttft_ms: float, slo_itl_ms: float
) -> Summary:
    """Percentiles and means of a run in which every request has ended."""
    ledger = run.ledger
    ttft = (ledger.first_s - ledger.arrival_s)[1:] * 1000
    e2e = (ledger.last_s - ledger.arrival_s)[1:] * 1000
    got = ledger.got[1:]
    mean_itl = (ledger.last_s - ledger.first_s)[1:] * 1000 / np.maximum(got - 1, 1)
    good = int(((ttft <= slo_ttft_ms) & (mean_itl <= slo_itl_ms)).sum())
    prompt, cached = int(ledger.prompt_len.sum(dtype=np.int64)), int(ledger.cached.sum(dtype=np.int64))
    itl_p50, itl_p99 = (value * 1000 for value in ledger.gaps.percentiles_s((0.5, 0.99)))
    duration_s = run.end_s - float(ledger.arrival_s[1])
    seconds = run.means.seconds
    return Summary(
        trace=trace,
        arrivals=arrivals,
        rate=rate,
        policy=policy,
        requests=len(got),
        ttft_p50=float(np.percentile(ttft, 50)),
        ttft_p99=float(np.percentile(ttft, 99)),
        itl_p50=itl_p50,
        itl_p99=itl_p99,
        itl_largest=ledger.gaps.largest_s * 1000,
        e2e_p50=float(np.percentile(e2e, 50)),
        e2e_p99=float(np.percentile(e2e, 99)),
        output_tok_s=int(got.sum(dtype=np.int64)) / duration_s,
        hit_rate=cached / prompt,
        goodput=good / duration_s,
        within_slo=good / len(got),
        retractions=run.num_retractions,
        recomputed=(run.prefilled - (prompt - cached)) / prompt,
        running=run.means.running / seconds,
        waiting=run.means.waiting / seconds,
        most_waiting=run.means.most_waiting,
        pool=run.means.pool / seconds,
        pool_queued=run.means.pool_queued / max(run.means.queued_seconds, 1e-9),
        busy=run.busy_s / duration_s,
        duration_s=duration_s,
        steps=run.num_steps,
        wall_s=run.wall_s,
        steps_per_s=run.num_steps / run.wall_s,
    )


def heading() -> str:
    """The table's first line."""
    return " ".join(f"{name:>{_width(form)}}" for _, name, form in COLUMNS)


def line(row: Summary) -> str:
    """One line of the table."""
    return " ".join(form.format(getattr(row, field)) for field, _, form in COLUMNS)


def _width(form: str) -> int:
    return int(form[3:].split(".")[0].rstrip("df}"))
