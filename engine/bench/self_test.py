"""Holds the benchmark's figures against a server that knows the truth: its times, its counts, and what went wrong."""

from __future__ import annotations

import itertools
import random
import secrets
from collections import Counter
from typing import NamedTuple

from engine.bench.fake_server import Ending, FakeServer, Script, Truth
from engine.bench.job import Ask, Endpoint, Job, Outcome, Record, Target
from engine.bench.load import run_load
from engine.bench.report import Times, times

LIMIT_MS = 5.0
"""How far a time may be from the truth on a quiet machine."""
_TIMEOUT_S = 3.0
_RATE = 50.0
_NUM_GOOD = 40
_CONCURRENCY, _PROCESSES = 32, 2
_CHUNKS = 12
_KINDS: dict[Ending, str] = {
    "no usage": "no usage",
    "error event": "error event",
    "cut": "broken stream",
    "reset": "broken stream",
    "status 500": "status 500",
    "hang": "timeout",
}
"""How the benchmark should call what the fake server does wrong."""


class Findings(NamedTuple):
    """Of one endpoint."""

    problems: list[str]
    """What is wrong whatever the machine is busy with; none if all is well."""
    ttft_off_ms: Times
    """How far times to the first token are from the truth."""
    itl_off_ms: Times
    e2e_off_ms: Times
    within: float
    """Share of all these times that are within LIMIT_MS of the truth."""
    num_kinds: Counter[str]
    """Failed requests by kind."""


def scripts(seed: int) -> list[Script]:
    """Good answers and bad ones, in a random order."""
    rng = random.Random(seed)
    good = [Script(_gaps(rng), "done", bool(index & 1), bool(index & 2)) for index in range(_NUM_GOOD)]
    bad = [Script(_gaps(rng), ending) for ending in _KINDS for _ in range(2)]
    return rng.sample(good + bad, len(good) + len(bad))


def _gaps(rng: random.Random) -> list[float]:
    return [rng.uniform(0.03, 0.1), *(rng.uniform(0.012, 0.03) for _ in range(_CHUNKS - 1))]


def self_test(endpoint: Endpoint, seed: int = 0) -> tuple[Findings, Outcome]:
    """Measure the fake server once."""
    played = scripts(seed)
    if endpoint == "generate":
        # Its counts come with every chunk, so they cannot be missing.
        played = [script for script in played if script.ending != "no usage"]
    with FakeServer(played) as server:
        job = Job(
            target=Target(server.url, "fake", endpoint),
            asks=[Ask(index, "hello", _CHUNKS, index / _RATE) for index in range(len(played))],
            concurrency=_CONCURRENCY,
            run_id=secrets.token_hex(4),
            temperature=0.0,
            ignore_eos=True,
            timeout_s=_TIMEOUT_S,
        )
        outcome = run_load(job, _PROCESSES)
        return compare(outcome.records, played, server.truths), outcome


def compare(records: list[Record], played: list[Script], truths: list[Truth]) -> Findings:
    """Records against what the server did."""
    problems = [] if len(records) == len(played) else [f"{len(records)} records of {len(played)} requests"]
    ttft, itl, e2e = list[float](), list[float](), list[float]()
    for record in records:
        script, truth = played[record.index], truths[record.index]
        problems += [f"request {record.index} ({script.ending}): {what}" for what in _problems(record, script, truth)]
        if record.error or not record.arrivals:
            continue
        ttft.append(record.ttft_s - (truth.sent[0] - truth.entered))
        e2e.append(record.e2e_s - (truth.done - truth.entered))
        # Where the client fell behind, chunks were read together and their gaps are one.
        if len(record.arrivals) == len(truth.sent):
            true_gaps = [later - sooner for sooner, later in itertools.pairwise(truth.sent)]
            itl += [abs(gap - true) for gap, true in zip(record.gaps_s, true_gaps, strict=True)]
    every = [*ttft, *itl, *e2e]
    return Findings(
        problems,
        times(ttft) or Times(0, 0, 0, 0, 0),
        times(itl) or Times(0, 0, 0, 0, 0),
        times(e2e) or Times(0, 0, 0, 0, 0),
        sum(off * 1e3 <= LIMIT_MS for off in every) / max(len(every), 1),
        Counter(record.error for record in records if record.error),
    )


def _problems(record: Record, script: Script, truth: Truth) -> list[str]:
    """What cannot be, however slow the machine is."""
    expected = _KINDS.get(script.ending, "")
    if record.error != expected:
        return [f"called {record.error!r} ({record.message}) instead of {expected!r}"]
    problems = []
    # A reset takes along what the client has not read yet.
    if record.num_chunks != len(truth.sent) and script.ending != "reset":
        problems.append(f"{record.num_chunks} chunks with text of {len(truth.sent)}")
    if any(seen < sent for seen, sent in zip(record.arrivals, truth.sent, strict=False)):
        problems.append("text came before it was sent")
    if expected:
        return problems
    if (record.prompt_tokens, record.output_tokens, record.cached_tokens) != (7, len(script.gaps_s), 3):
        problems.append("wrong counts of tokens")
    if not record.sent <= truth.entered <= truth.done <= record.end:
        problems.append("it ended before the server had sent all, or began after the server had it")
    return problems


def describe(endpoint: Endpoint, findings: Findings) -> str:
    """Lines for a terminal."""
    lines = [f"{endpoint}: {findings.within:.1%} of all times within {LIMIT_MS:g} ms of the truth; ms off:"]
    for name, off in (
        ("TTFT", findings.ttft_off_ms),
        ("ITL", findings.itl_off_ms),
        ("E2E", findings.e2e_off_ms),
    ):
        lines.append(f"  {name:<5} p50 {off.p50:6.2f}  p99 {off.p99:6.2f}  most {off.max:6.2f}")
    lines.append("  failed: " + ", ".join(f"{count} x {kind}" for kind, count in sorted(findings.num_kinds.items())))
    return "\n".join([*lines, *(f"  PROBLEM {problem}" for problem in findings.problems)])
