"""GET /metrics: valid, monotone, complete while the engine is down, and quick."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from engine.errors import ContextLengthError, ProcessDiedError
from engine.ipc.messages import Ended, Finish, Stamps, Stats
from engine.server.keys import METRICS
from engine.server.metrics import Metrics
from tests.support.fake_client import FakeClient, FakeHealth
from tests.unit.server.support import CHAT, HELLO, Http, post

SECOND = 10**9


def ended(finish: Finish = Finish.LENGTH, num_tokens: int = 5, stamps: Stamps | None = None) -> Ended:
    return Ended(1, 0, finish, None, 7, num_tokens, 3, stamps or Stamps())


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


async def scrape(http: Http) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(name, labels) -> value. Checks that it is Prometheus text without anything negative."""
    response = await http.get("/metrics")
    assert response.status == 200
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = samples(await response.text())
    assert all(sample.value >= 0 for sample in found)
    assert not any(sample.name.endswith("_created") for sample in found)
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in found}


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float | None:
    return found.get((f"engine_{name}", frozenset(labels.items())))


def names(found: Iterable[tuple[str, object]]) -> set[str]:
    return {name for name, _ in found}


async def test_how_things_stand(http: Http) -> None:
    found = await scrape(http)
    assert value(found, "up") == 1
    assert value(found, "running_requests") == 1
    assert value(found, "waiting_requests") == 2
    pages = {state: value(found, "kv_pages", state=state) for state in ("free", "tree", "tail", "in_flight")}
    assert pages == {"free": 60, "tree": 30, "tail": 8, "in_flight": 2}
    assert sum(filter(None, pages.values())) == value(found, "kv_pool_pages") == 100
    assert value(found, "kv_usage_ratio") == pytest.approx(0.4)
    assert value(found, "cache_hit_ratio") == 0
    assert value(found, "accept_length") == pytest.approx((20 + 30) / 20)
    assert value(found, "scheduler_step") == 33
    assert value(found, "audit_errors") == 0
    (build,) = (dict(labels) for name, labels in found if name == "engine_build_info")
    assert build["model"] == "org/tiny"


async def test_processes(http: Http, fake: FakeClient) -> None:
    fake.report.processes = [
        {"name": "scheduler 0", "up": True, "heartbeat_age_s": 0.25},
        {"name": "detokenizer 0", "up": False, "heartbeat_age_s": None},
    ]
    found = await scrape(http)
    assert value(found, "process_up", process="scheduler 0") == 1
    assert value(found, "process_up", process="detokenizer 0") == 0
    assert value(found, "process_heartbeat_age_seconds", process="scheduler 0") == 0.25
    assert value(found, "process_heartbeat_age_seconds", process="detokenizer 0") is None


async def test_ends_by_outcome_and_status(http: Http, fake: FakeClient) -> None:
    (observer,) = fake.observers
    for finish in (Finish.STOP_TOKEN, Finish.STOP_STRING, Finish.LENGTH, Finish.ABORT):
        observer.on_ended("label", ended(finish))
    observer.on_error("label", ContextLengthError("too long"))
    observer.on_error("label", ProcessDiedError("gone"))
    observer.on_gone("label")
    found = await scrape(http)
    assert value(found, "requests_total", outcome="stop", status="200") == 2
    assert value(found, "requests_total", outcome="length", status="200") == 1
    assert value(found, "requests_total", outcome="abort", status="200") == 1
    assert value(found, "requests_total", outcome="error", status="400") == 1
    assert value(found, "requests_total", outcome="error", status="500") == 1
    assert value(found, "requests_total", outcome="cancelled", status="499") == 1
    assert not any("label" in str(labels) for name, labels in found if name.startswith("engine_"))


async def test_times_from_the_stations_of_a_request(http: Http, fake: FakeClient) -> None:
    (observer,) = fake.observers
    base = 100 * SECOND
    stamps = Stamps(base, base + SECOND, base + 2 * SECOND, base + 5 * SECOND, base + 9 * SECOND, base + 11 * SECOND)
    observer.on_ended("", ended(num_tokens=5, stamps=stamps))
    found = await scrape(http)
    sums = {
        "tokenize_time": 1,
        "queue_time": 3,
        "prefill_time": 4,
        "time_to_first_token": 9,
        "time_per_output_token": 0.5,
        "request_latency": 11,
    }
    for name, seconds in sums.items():
        assert value(found, f"{name}_seconds_count") == 1
        assert value(found, f"{name}_seconds_sum") == pytest.approx(seconds)
        assert value(found, f"{name}_seconds_bucket", le="+Inf") == 1


@pytest.mark.parametrize(
    "stamps",
    [Stamps(), Stamps(arrived=5), Stamps(arrived=5, tokenized=6, queued=7), Stamps(arrived=9, first_token=5, sent=2)],
)
async def test_stations_that_were_not_reached_are_not_counted(http: Http, fake: FakeClient, stamps: Stamps) -> None:
    (observer,) = fake.observers
    observer.on_ended("", ended(num_tokens=0, stamps=stamps))
    found = await scrape(http)
    assert value(found, "time_to_first_token_seconds_count") == 0
    assert value(found, "time_per_output_token_seconds_count") == 0
    assert value(found, "request_latency_seconds_count") == 0


async def test_responses_by_route_and_status(http: Http, fake: FakeClient) -> None:
    assert (await post(http, HELLO)).status == 200
    assert (await post(http, {})).status == 400
    await http.get("/v1/models/org/tiny")
    for path in ("/secret-1", "/secret-2"):
        await http.get(path)
    await http.request("BREW", "/metrics")
    found = await scrape(http)
    assert value(found, "http_responses_total", route=CHAT, status="200") == 1
    assert value(found, "http_responses_total", route=CHAT, status="400") == 1
    assert value(found, "http_responses_total", route="/v1/models/{name}", status="200") == 1
    assert value(found, "http_responses_total", route="none", status="404") == 2
    assert "secret" not in str(found)
    fake.script.hang_after_texts = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await post(http, HELLO)
    await asyncio.wait_for(fake.closed.wait(), 2)
    await asyncio.sleep(0.02)
    assert value(await scrape(http), "http_responses_total", route=CHAT, status="499") == 1


async def test_token_counters_go_on_when_the_scheduler_starts_again(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {
        "prompt_tokens": "prompt_tokens",
        "cached_tokens": "cached_tokens",
        "generation_tokens": "output_tokens",
        "retractions": "retractions",
        "drafted_tokens": "drafted_tokens",
        "accepted_tokens": "accepted_tokens",
        "verified_rows": "verified_rows",
    }
    counts = [
        (100, 40, 10, 1, 8, 6, 2),
        (150, 60, 20, 2, 16, 7, 4),
        (30, 0, 5, 0, 0, 0, 0),
        (40, 10, 6, 0, 4, 2, 4),
    ]
    seen, lengths = [], []
    for now in counts:

        async def stats(now: tuple[int, ...] = now) -> Stats:
            return Stats(0, 1, 2, 33, 100, 60, 30, 8, 2, 0, **dict(zip(fields.values(), now, strict=True)))

        monkeypatch.setattr(fake, "stats", stats)
        found = await scrape(http)
        seen.append(tuple(value(found, f"{name}_total") for name in fields))
        lengths.append(value(found, "accept_length"))
    assert seen == [
        (100, 40, 10, 1, 8, 6, 2),
        (150, 60, 20, 2, 16, 7, 4),
        (180, 60, 25, 2, 16, 7, 4),
        (190, 70, 26, 2, 20, 9, 8),
    ]
    assert value(found, "cache_hit_ratio") == 0.25
    # A mean of nothing is not there.
    assert lengths == [4.0, 2.75, None, 1.5]


async def test_a_scrape_while_the_engine_is_down(http: Http, fake: FakeClient) -> None:
    before = await scrape(http)
    fake.observers[0].on_ended("", ended())
    fake.state = "restarting"
    fake.report = FakeHealth(False, "restarting", "a process ended", [])
    found = await scrape(http)
    assert value(found, "up") == 0
    assert value(found, "requests_total", outcome="length", status="200") == 1
    assert value(found, "prompt_tokens_total") == value(before, "prompt_tokens_total")
    assert "engine_running_requests" not in names(found)
    assert "engine_kv_pages" not in names(found)


async def test_a_scheduler_that_does_not_answer_delays_nobody(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang() -> Stats:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(fake, "stats", hang)
    begin = time.monotonic()
    found = await scrape(http)
    assert time.monotonic() - begin < 2
    assert "engine_running_requests" not in names(found)


async def test_two_applications_share_nothing(http: Http, fake: FakeClient) -> None:
    other = Metrics()
    other.on_ended("", ended())
    assert http.app is not None
    http.app[METRICS].on_error("", ProcessDiedError("x"))
    text = other.render("m", FakeHealth(True, "ready", "", []), None).decode()  # ty: ignore[invalid-argument-type]
    assert 'outcome="length"' in text
    assert 'outcome="error"' not in text
    assert value(await scrape(http), "requests_total", outcome="length", status="200") is None


async def test_a_model_name_cannot_forge_lines(http: Http, fake: FakeClient) -> None:
    fake.model_name = 'x"} 1\nengine_fake 1\n\\'
    found = await scrape(http)
    assert "engine_fake" not in names(found)
    (build,) = (dict(labels) for name, labels in found if name == "engine_build_info")
    assert build["model"] == fake.model_name


async def test_counts_of_other_fronts_are_added(http: Http, fake: FakeClient) -> None:
    assert http.app is not None
    own, other = http.app[METRICS], Metrics()
    stamps = Stamps(arrived=SECOND, sent=3 * SECOND)
    own.on_ended("", ended(stamps=stamps))
    for _ in range(2):
        other.on_ended("", ended(stamps=stamps))
    other.on_error("", ContextLengthError("x"))
    health = FakeHealth(True, "ready", "", [])
    for _ in range(2):
        # What is added is not kept.
        text = own.render("m", health, None, [*other.samples(), *other.samples()]).decode()  # ty: ignore[invalid-argument-type]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in samples(text)}
    assert value(found, "requests_total", outcome="length", status="200") == 1 + 2 + 2
    assert value(found, "requests_total", outcome="error", status="400") == 1 + 1
    assert value(found, "request_latency_seconds_count") == 5
    assert value(found, "request_latency_seconds_sum") == pytest.approx(10)
    assert value(found, "request_latency_seconds_bucket", le="2.5") == 5
    assert value(found, "request_latency_seconds_bucket", le="1.0") == 0
    assert value(await scrape(http), "requests_total", outcome="length", status="200") == 1


def test_samples_are_what_was_counted_and_nothing_else() -> None:
    names = {name for name, _, _ in Metrics().samples()}
    assert names
    assert all(name.startswith("engine_") and not name.endswith("_created") for name in names)
