"""GET /metrics: what has happened so far (counters, histograms) and how things stand (gauges), for Prometheus."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import engine
from engine.errors import EngineError
from engine.ipc.control import Sample
from engine.ipc.messages import Ended, Finish, Stats
from engine.server.keys import CLIENT_GONE, FRONTS

if TYPE_CHECKING:
    from engine.health import Health

OUTCOMES = {
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
}
REQUEST_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)

COUNTERS = (
    ("prompt_tokens", "Prompt tokens of requests that started.", "prompt_tokens"),
    ("cached_tokens", "Prompt tokens that came from the prefix cache.", "cached_tokens"),
    ("generation_tokens", "Tokens generated.", "output_tokens"),
    ("retractions", "Running requests put back into the queue to free memory.", "retractions"),
    ("drafted_tokens", "Drafted tokens that were verified.", "drafted_tokens"),
    ("accepted_tokens", "Drafted tokens that were accepted.", "accepted_tokens"),
    ("verified_rows", "Rows of steps that verified drafts; each gives a token and those accepted.", "verified_rows"),
)
"""Name, help and field of Stats of what the scheduler counts."""


class Metrics:
    """One application's metrics. An observer of its EngineClient: told of every request's end."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._gauges = _Snapshot()
        self._registry.register(self._gauges)
        counts = CollectorRegistry()
        self._counts = _Counts(counts)
        self._registry.register(self._counts)

        def seconds(name: str, text: str, buckets: tuple[float, ...] = REQUEST_SECONDS) -> Histogram:
            return Histogram(f"engine_{name}_seconds", text, buckets=buckets, registry=counts)

        self._requests = Counter(
            "engine_requests",
            "Ended requests by outcome (stop, length, abort, error, cancelled) and HTTP status.",
            ("outcome", "status"),
            registry=counts,
        )
        self._responses = Counter(
            "engine_http_responses",
            "HTTP responses by route and status (499: the client went away).",
            ("route", "status"),
            registry=counts,
        )
        self._tokenize = seconds("tokenize_time", "From arrival to token ids.")
        self._queue = seconds("queue_time", "From the queue into the running batch.")
        self._prefill = seconds("prefill_time", "From the running batch to the first token.")
        self._first_token = seconds("time_to_first_token", "From arrival to the first token.")
        self._per_token = seconds(
            "time_per_output_token", "Mean of one request between two of its tokens.", TOKEN_SECONDS
        )
        self._latency = seconds("request_latency", "From arrival to the last token.")

    # -- the client's observer ------------------------------------------------------------------------------------

    def on_ended(self, label: str, ended: Ended) -> None:
        """Count a request that came to its end."""
        self._requests.labels(OUTCOMES.get(ended.finish, "error"), "200").inc()
        stamps = ended.stamps
        _observe(self._tokenize, stamps.arrived, stamps.tokenized)
        _observe(self._queue, stamps.queued, stamps.first_scheduled)
        _observe(self._prefill, stamps.first_scheduled, stamps.first_token)
        _observe(self._first_token, stamps.arrived, stamps.first_token)
        _observe(self._per_token, stamps.first_token, stamps.sent, ended.num_tokens - 1)
        _observe(self._latency, stamps.arrived, stamps.sent)

    def on_error(self, label: str, error: EngineError) -> None:
        """Count a request that was refused or failed."""
        self._requests.labels("error", str(error.status)).inc()

    def on_gone(self, label: str) -> None:
        """Count a request whose client went away."""
        self._requests.labels("cancelled", str(CLIENT_GONE)).inc()

    # -- the HTTP front -------------------------------------------------------------------------------------------

    def on_response(self, route: str, status: int) -> None:
        """Count a response; `route` is the matched pattern, never a client's path."""
        self._responses.labels(route, str(status)).inc()

    def samples(self) -> list[Sample]:
        """What was counted and timed here, for the front that renders it."""
        self._counts.others = ()
        return [
            (sample.name, sample.labels, sample.value)
            for metric in _WithoutCreated(self._counts).collect()
            for sample in metric.samples
        ]

    def render(self, model: str, health: Health, stats: Stats | None, others: Sequence[Sample] = ()) -> bytes:
        """Everything in the text format. Without `stats` the scheduler's gauges are absent, not stale.

        `others`: what other fronts have counted, which is added to what was counted here.
        """
        self._gauges.take(model, health, stats)
        self._counts.others = others
        return generate_latest(_WithoutCreated(self._registry))


async def metrics(request: web.Request) -> web.Response:
    """Answers 200 within seconds, whatever the engine does."""
    body = await request.app[FRONTS].metrics()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4, "Cache-Control": "no-store"})


def _observe(histogram: Histogram, since: int, until: int, parts: int = 1) -> None:
    """Nanoseconds between two stamps, in seconds per part; stamps that are 0 were never reached."""
    if since and until >= since and parts > 0:
        histogram.observe((until - since) / 1e9 / parts)


class _Counts(Collector):
    """Counters and histograms of this front, with those of other fronts added."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.others: Sequence[Sample] = ()

    def collect(self) -> Iterable[Metric]:
        more: defaultdict[str, dict[frozenset[tuple[str, str]], float]] = defaultdict(dict)
        for name, labels, value in self.others:
            values, key = more[name], frozenset(labels.items())
            values[key] = values.get(key, 0.0) + value
        for metric in self._registry.collect():
            names = dict.fromkeys(sample.name for sample in metric.samples)
            metric.samples = [
                sample._replace(value=sample.value + more[sample.name].pop(frozenset(sample.labels.items()), 0.0))
                for sample in metric.samples
            ]
            # Labels that have not come up here.
            for name in names or (f"{metric.name}_total",):
                for labels, value in more[name].items():
                    metric.add_sample(name, dict(labels), value)
            yield metric


class _WithoutCreated(Collector):
    """The library's counters and histograms without a sample of their own for when each began."""

    def __init__(self, registry: Collector) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class _Snapshot(Collector):
    """Health and the scheduler's counts as of the last `take`."""

    def __init__(self) -> None:
        self._model = ""
        self._health: Health | None = None
        self._stats: Stats | None = None
        self._totals = {key: 0 for _, _, key in COUNTERS}
        self._last = dict(self._totals)

    def take(self, model: str, health: Health, stats: Stats | None) -> None:
        self._model, self._health, self._stats = model, health, stats
        if stats is None:
            return
        for name, last in self._last.items():
            now = getattr(stats, name)
            # A scheduler that was started again counts from 0; the totals go on.
            self._totals[name] += now - last if now >= last else now
            self._last[name] = now

    def collect(self) -> Iterable[Metric]:
        if self._health is None:
            return
        yield InfoMetricFamily(
            "engine_build", "Version and served model.", {"version": engine.__version__, "model": self._model}
        )
        yield GaugeMetricFamily("engine_up", "1 while /health says 200.", int(self._health.ok))
        yield from self._processes(self._health)
        for name, text, key in COUNTERS:
            yield CounterMetricFamily(f"engine_{name}", text, self._totals[key])
        if self._stats is not None:
            yield from self._scheduler(self._stats)

    def _processes(self, health: Health) -> Iterable[Metric]:
        up = GaugeMetricFamily("engine_process_up", "1 while a process is loaded and serving.", labels=["process"])
        age = GaugeMetricFamily(
            "engine_process_heartbeat_age_seconds", "Since a process last gave a sign of life.", labels=["process"]
        )
        for process in health.processes:
            name = str(process.get("name", ""))
            up.add_metric([name], int(bool(process.get("up", False))))
            seconds = process.get("heartbeat_age_s")
            if isinstance(seconds, int | float):
                age.add_metric([name], max(seconds, 0.0))
        yield up
        yield age

    def _scheduler(self, stats: Stats) -> Iterable[Metric]:
        pages = GaugeMetricFamily("engine_kv_pages", "KV pages by owner; they add up to the pool.", labels=["state"])
        for state in ("free", "tree", "tail", "in_flight"):
            pages.add_metric([state], getattr(stats, f"pages_{state}"))
        yield pages
        total = max(stats.pages_total, 1)
        for name, text, value in (
            ("running_requests", "Requests in the running batch.", stats.running),
            ("waiting_requests", "Requests in the queue.", stats.waiting),
            ("kv_pool_pages", "KV pages of the pool.", stats.pages_total),
            (
                "kv_usage_ratio",
                "Share of KV pages that are not free; cached prefixes count, though they go when memory is needed.",
                (stats.pages_total - stats.pages_free) / total,
            ),
            (
                "cache_hit_ratio",
                "Share of prompt tokens that came from the prefix cache, since the scheduler's start.",
                stats.cached_tokens / max(stats.prompt_tokens, 1),
            ),
            ("scheduler_step", "Steps since the scheduler's start.", stats.step),
            ("audit_errors", "Pages found without a rightful owner and put right.", stats.audit_errors),
        ):
            yield GaugeMetricFamily(f"engine_{name}", text, value)
        if stats.verified_rows:
            yield GaugeMetricFamily(
                "engine_accept_length",
                "Mean tokens that a row gave in steps that verified drafts, since the scheduler's start.",
                (stats.verified_rows + stats.accepted_tokens) / stats.verified_rows,
            )
