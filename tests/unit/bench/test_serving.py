"""The serving benchmark against servers that know the truth: its times, its counts, and how it names failures."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.bench.command import main
from engine.bench.fake_server import FakeServer, Script
from engine.bench.job import Ask, BenchError, Endpoint, Job, Target
from engine.bench.load import run_load
from engine.bench.self_test import self_test

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    "endpoint",
    ["completions", pytest.param("chat", marks=pytest.mark.slow), pytest.param("generate", marks=pytest.mark.slow)],
)
def test_times_are_true_and_failures_are_counted(endpoint: Endpoint) -> None:
    findings, outcome = self_test(endpoint)
    assert findings.problems == []
    missing = {} if endpoint == "generate" else {"no usage": 2}
    assert findings.num_kinds == Counter(
        {"broken stream": 4, "error event": 2, "status 500": 2, "timeout": 2, **missing}
    )
    # On a busy machine single times are late; most are not.
    assert findings.ttft_off_ms.p50 < 10
    assert findings.itl_off_ms.p50 < 5
    assert findings.e2e_off_ms.p50 < 10
    assert 0 < outcome.busy < 1


def _job(url: str, count: int, concurrency: int, **changes: float) -> Job:
    asks = [Ask(index, "x", 3, changes.get("every_s", 0.0) * index) for index in range(count)]
    return Job(Target(url, "fake", "completions", "secret"), asks, concurrency, "test", 0.0, True, 20.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer([Script([0.02, 0.01, 0.01])] * 24) as found:
        yield found


def test_processes_share_the_requests_and_the_limit(server: FakeServer) -> None:
    ended = []
    outcome = run_load(_job(server.url, 24, concurrency=5), 2, ended.append)
    assert [record.index for record in outcome.records] == list(range(24))
    assert not any(record.error for record in outcome.records)
    assert sum(ended) == 24
    changes = sorted(change for record in outcome.records for change in ((record.sent, 1), (record.end, -1)))
    running = most = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    assert most == 5


def test_requests_are_not_sent_before_their_time(server: FakeServer) -> None:
    records = run_load(_job(server.url, 8, concurrency=8, every_s=0.1), 2).records
    # The first may be late itself, so the whole may be a little shorter than it should.
    assert records[-1].sent - records[0].sent > 0.5


def test_nobody_listens() -> None:
    records = run_load(_job("http://127.0.0.1:9", 2, concurrency=2), 1).records
    assert [record.error for record in records] == ["connection"] * 2
    assert "9" in records[0].message


def test_an_outcome_may_be_larger_than_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    records = run_load(_job("http://127.0.0.1:9", 800, concurrency=4), 1).records
    assert len(records) == 800 and sum(len(record.message) for record in records) > 65536


def test_a_client_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BenchError, match="status 1"):
        run_load(_job("http://127.0.0.1:9", 2, concurrency=2), 1)


def test_the_command(server: FakeServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "figures.json", tmp_path / "load.svg"
    arguments = f"--base-url {server.url}/v1/ --num-prompts 6 --concurrency 3 --processes 2 --warmup 2 --output-len 3:4"
    goals = "--goodput ttft:10000 tpot:0.001 e2el:10000"
    status = main([*arguments.split(), *goals.split(), "--json", str(figures), "--plot", str(picture)])
    printed = capfd.readouterr().out
    assert status == 0 and "6 ok, 0 failed" in printed and "fake at" in printed
    found = json.loads(figures.read_text())
    summary, rows = found["summary"], found["requests"]
    assert (summary["num_ok"], summary["input_tokens"], summary["output_tokens"]) == (6, 6 * 7, 6 * 3)
    assert summary["cached_tokens"] == 6 * 3 and 1 <= summary["peak_concurrent"] <= 3
    assert summary["goodput"]["share"] == 0
    asked = [server.bodies[index]["max_tokens"] for index in range(6)]
    assert summary["num_other_length"] == sum(length != 3 for length in asked)
    assert len(rows) == 6 and all(row["ttft_ms"] >= 19 and len(row["itl_ms"]) <= 2 for row in rows)
    assert "api_key" not in found["options"] and found["options"]["output_len"] == "3:4"
    assert found["options"]["model"] == "fake"
    assert server.bodies[0]["ignore_eos"] is True and server.bodies[0]["stream_options"] == {"include_usage": True}
    root = ElementTree.fromstring(picture.read_text())
    assert {"output tok/s", "running requests"} <= {mark.text for mark in root.iter(f"{SVG}text")}


def test_failures_have_their_own_status(capfd: pytest.CaptureFixture[str]) -> None:
    with FakeServer([Script([0.01], "status 500"), Script([0.01])]) as server:
        status = main(f"--base-url {server.url} --num-prompts 2 --output-len 1 --endpoint generate".split())
    assert status == 1
    assert "1 ok, 1 failed" in (printed := capfd.readouterr().out) and "failed: 1 x status 500" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--endpoint chat --dataset random-ids", "no token ids"),
        ("--dataset sharegpt-file", "go together"),
        ("--goodput latency:3", "a goal is"),
        ("--base-url http://127.0.0.1:9", "names no model"),
        ("--base-url http://127.0.0.1:9 --model m --warmup 1", "a warm-up request failed: connection"),
        ("--input-len 5:3", "invalid"),
        ("--request-rate 0", "no rate above 0"),
    ],
)
def test_what_cannot_run_says_why(arguments: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert said in capfd.readouterr().err
