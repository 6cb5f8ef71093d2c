"""--http-workers: one server in several HTTP processes, whichever of them a client meets."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.test_life import assert_gone, wait_running
from tests.support.server import Server, serve
from tests.support.streaming import Answer, session, stream_chat

ENDLESS = {"max_tokens": 900_000, "ignore_eos": True}


def args(model: Path, *more: str) -> tuple[str, ...]:
    return ("--model", str(model), "--device", "null", "--http-workers", "3", "--drain-timeout", "1", *more)


@pytest.fixture(scope="module")
def three(endless_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(*args(endless_model), log=tmp_path_factory.mktemp("logs") / "three.log") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log


def pids(server: Server) -> dict[str, int]:
    """Full process name (`front 1`, `scheduler 0`, ...) -> pid, of every child."""
    found = {}
    for child in psutil.Process(server.process.pid).children():
        try:
            title = " ".join(child.cmdline()).rstrip()
        except psutil.NoSuchProcess:
            continue
        if title.startswith("engine: "):
            found[title.removeprefix("engine: ")] = child.pid
    return found


def connections(server: Server) -> list[int]:
    """How many HTTP connections each front has, most first."""
    found = []
    for pid in (server.process.pid, *(pid for name, pid in pids(server).items() if name.startswith("front"))):
        open_ones = psutil.Process(pid).net_connections("tcp")
        found.append(sum(c.status == "ESTABLISHED" and c.laddr.port == server.port for c in open_ones))
    return sorted(found, reverse=True)


def metrics(server: Server) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def ended(server: Server) -> float:
    """Ended requests of all outcomes."""
    return sum(value for (name, _), value in metrics(server).items() if name == "engine_requests_total")


def end_by_many_signals(server: Server) -> None:
    """SIGTERM again and again until the server is gone: a clean end all the same."""
    while server.process.poll() is None:
        server.process.terminate()
        time.sleep(0.001)
    assert server.process.returncode == 0


def start_streams(client: aiohttp.ClientSession, server: Server, count: int = 3) -> list[asyncio.Task[Answer]]:
    """Endless streams, one after the other on the fronts."""
    return [asyncio.create_task(stream_chat(client, server.url, f"Go on {i}", **ENDLESS)) for i in range(count)]


async def outcomes(streams: list[asyncio.Task[Answer]]) -> list[str]:
    """Per stream, in the order of the words: `broken` (connection), `error` (event) or its finish."""
    found = []
    for result in await asyncio.gather(*streams, return_exceptions=True):
        if isinstance(result, aiohttp.ClientError):
            found.append("broken")
        else:
            assert isinstance(result, Answer), result
            found.append("error" if result.error is not None else str(result.finish))
    return sorted(found)


async def test_streams_are_whole_spread_and_counted(three: Server) -> None:
    before = metrics(three)
    count = 60
    async with session() as client:
        streams = [
            asyncio.create_task(stream_chat(client, three.url, f"Hello {i}", max_tokens=40 + i, ignore_eos=True))
            for i in range(count)
        ]
        answers = await asyncio.gather(*streams)
        assert connections(three) == [20, 20, 20]
    for i, answer in enumerate(answers):
        assert answer.done
        assert answer.usage["completion_tokens"] == 40 + i
    for i in range(0, count, 10):
        _, body = three.chat(f"Hello {i}", max_tokens=40 + i, ignore_eos=True)
        assert body["choices"][0]["message"]["content"] == answers[i].text
    after = metrics(three)

    def rise(name: str, **labels: str) -> float:
        key = f"engine_{name}", frozenset(labels.items())
        return after[key] - before.get(key, 0.0)

    assert rise("requests_total", outcome="length", status="200") == count + 6
    assert rise("request_latency_seconds_count") == count + 6
    assert rise("request_latency_seconds_bucket", le="+Inf") == count + 6
    assert rise("http_responses_total", route="/v1/chat/completions", status="200") == count + 6


def test_every_front_gives_the_same_answers(three: Server) -> None:
    def on_each_front(path: str) -> list[dict]:
        return [three.get(path)[1] for _ in range(3)]

    for path in ("/v1/models", "/model_info"):
        first, *others = on_each_front(path)
        assert others == [first, first]
    infos = on_each_front("/server_info")
    for info in infos:
        del info["processes"]
        del info["scheduler"]["step"]
    assert infos[1:] == [infos[0], infos[0]]
    assert infos[0]["context_length"] == 1_000_000
    for health in on_each_front("/health"):
        assert health["status"] == "ok"
        names = {process["name"]: process["up"] for process in health["processes"]}
        assert {"front 0", "front 1", "front 2", "scheduler 0"} <= set(names)
        assert all(names.values())
    texts = []
    for _ in range(3):
        found = metrics(three)
        texts.append({key for key in found if "http_responses" not in key[0]})
    assert texts[1:] == [texts[0], texts[0]]


async def test_an_abort_reaches_its_request_wherever_it_runs(three: Server) -> None:
    async def ask(body: dict) -> int:
        status, answer = await asyncio.to_thread(three.request, "POST", "/abort_request", body)
        assert status == 200
        return answer["aborted"]

    async with session() as client:
        for asked_at in range(3):
            rid = f"one-{asked_at}"
            body = {"text": "Go on", "rid": rid, "sampling_params": {"max_new_tokens": 900_000, "ignore_eos": True}}
            running = asyncio.create_task(client.post(f"{three.url}/generate", json=body))
            await wait_running(three, 1)
            for _ in range(asked_at):
                await asyncio.to_thread(three.get, "/v1/models")
            assert await ask({"rid": "one"}) == 0
            assert await ask({"rid": rid}) == 1
            async with await running as response:
                assert (await response.json())["meta_info"]["finish_reason"]["type"] == "abort"
    async with session() as client:
        streams = start_streams(client, three, 6)
        await wait_running(three, 6)
        assert await ask({"abort_all": True}) == 6
        assert await outcomes(streams) == ["abort"] * 6
    three.wait_idle()


def test_a_second_server_on_the_port_is_refused(three: Server, endless_model: Path, tmp_path: Path) -> None:
    more = args(endless_model, "--port", str(three.port))
    with serve(*more, log=tmp_path / "log", ready=False) as second:
        assert second.process.wait(20) == 5
        assert str(three.port) in second.log
        assert "Traceback" not in second.log


async def test_a_hung_worker_gets_no_new_connections(three: Server) -> None:
    pid = pids(three)["front 1"]
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(1.6)
        begin = time.monotonic()
        for _ in range(4):
            assert three.chat("hello", max_tokens=2)[0] == 200
        assert metrics(three)
        # What has to be known of all fronts is known without it: at once, or after a moment.
        assert (await asyncio.to_thread(three.request, "POST", "/abort_request", {"rid": "nobody"}))[0] == 200
        assert time.monotonic() - begin < 3
    finally:
        os.kill(pid, signal.SIGCONT)
    three.until(lambda: three.get("/health")[1]["status"] == "ok", "recover", timeout_s=5)


async def test_every_front_asks_for_the_key_and_no_other_process_knows_it(endless_model: Path, tmp_path: Path) -> None:
    key = "open-sesame-8731"
    with serve(*args(endless_model), log=tmp_path / "log", env={"ENGINE_API_KEY": key}) as server:
        for _ in range(3):
            assert server.get("/v1/models")[0] == 401
        headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
        async with session() as client:
            for _ in range(3):
                async with client.get(f"{server.url}/v1/models", headers=headers) as response:
                    assert response.status == 200
        for pid in pids(server).values():
            child = psutil.Process(pid)
            assert key not in str(child.environ()) + str(child.cmdline())
        assert server.stop() == 0


@pytest.mark.parametrize("victim", ["front 1", "front 2", "scheduler 0"])
async def test_a_killed_process_ends_the_server(endless_model: Path, tmp_path: Path, victim: str) -> None:
    with serve(*args(endless_model), log=tmp_path / "log") as server:
        children = pids(server)
        async with session() as client:
            streams = start_streams(client, server)
            await wait_running(server, 3)
            os.kill(children[victim], signal.SIGKILL)
            ends = await outcomes(streams)
        assert ends == (["broken", "error", "error"] if victim.startswith("front") else ["error"] * 3)
        assert server.process.wait(10) == 70
        assert_gone(list(children.values()), server.port)
        assert victim.removesuffix(" 0") in server.log.strip().splitlines()[-1]


async def test_what_is_killed_is_started_again(endless_model: Path, tmp_path: Path) -> None:
    with serve(*args(endless_model, "--on-crash", "restart"), log=tmp_path / "log") as server:
        for victim in ("front 1", "front 2"):
            # Alone: what runs elsewhere goes on.
            before, counted = pids(server), ended(server)
            async with session() as client:
                streams = start_streams(client, server)
                await wait_running(server, 3)
                os.kill(before[victim], signal.SIGKILL)
                await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED, timeout=5)
                assert sum(stream.done() for stream in streams) == 1
                while pids(server).get(victim) in (None, before[victim]) or server.get("/health")[0] != 200:
                    await asyncio.sleep(0.02)
                # What the dead one had begun is aborted by its successor.
                while server.scheduler()["running"] != 2:
                    await asyncio.sleep(0.02)
                assert sum(stream.done() for stream in streams) == 1
                _, aborted = await asyncio.to_thread(server.request, "POST", "/abort_request", {"abort_all": True})
                assert aborted["aborted"] == 2
                assert await outcomes(streams) == ["abort", "abort", "broken"]
            for _ in range(6):
                assert server.chat("hello again", max_tokens=2)[0] == 200
            # Those that died unseen aside, counts go on from where they were.
            assert ended(server) == counted + 2 + 6
            after = pids(server)
            assert {name for name in before if before[name] != after[name]} == {victim}
        server.wait_idle()
        # With the scheduler go the other processes behind the fronts, and what runs; the fronts stay.
        before, counted = pids(server), ended(server)
        async with session() as client:
            streams = start_streams(client, server)
            await wait_running(server, 3)
            os.kill(before["scheduler 0"], signal.SIGKILL)
            assert await outcomes(streams) == ["error"] * 3
            server.until(lambda: server.get("/health")[0] == 200, "recover")
            # At once on every front.
            for _ in range(6):
                status, body = server.chat("again", max_tokens=3)
                assert status == 200, body
        after = pids(server)
        same = {name for name in before if before[name] == after[name]}
        assert same == {"front 1", "front 2"}
        # The warm-up request is one.
        assert ended(server) == counted + 3 + 1 + 6
        # A worker that hangs holds up nobody, and is replaced.
        before = pids(server)
        os.kill(before["front 1"], signal.SIGSTOP)
        os.kill(before["scheduler 0"], signal.SIGKILL)
        server.until(lambda: pids(server).get("scheduler 0") not in (None, before["scheduler 0"]), "recover", 5)
        server.until(lambda: server.get("/health")[1]["state"] == "ready", "recover", 5)
        assert server.chat("again", max_tokens=3)[0] == 200
        server.until(lambda: server.get("/health")[0] == 200, "replace the hung worker", 10)
        assert before["front 1"] not in pids(server).values()
        end_by_many_signals(server)


@pytest.mark.parametrize("whole_group", [False, True])
async def test_a_drain_finishes_the_streams_of_all_fronts(
    endless_model: Path, tmp_path: Path, whole_group: bool
) -> None:
    with serve(*args(endless_model, "--drain-timeout", "30"), log=tmp_path / "log") as server:
        children = pids(server)
        idle = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=10) for _ in range(3)]
        for connection in idle:
            connection.connect()
        async with session() as client:
            streams = [
                asyncio.create_task(stream_chat(client, server.url, f"{i}", max_tokens=20000, ignore_eos=True))
                for i in range(3)
            ]
            await wait_running(server, 3)
            for pid in (*children.values(), server.process.pid) if whole_group else (server.process.pid,):
                os.kill(pid, signal.SIGTERM)
            await asyncio.sleep(0.1)
            for connection in idle:
                body = b'{"messages": [{"role": "user", "content": "new"}]}'
                connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
                response = connection.getresponse()
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
                response.read()
                connection.close()
            answers = await asyncio.gather(*streams)
            assert [answer.usage["completion_tokens"] for answer in answers] == [20000] * 3
            assert all(answer.done for answer in answers)
        assert server.process.wait(10) == 0
        assert "in_flight=3" in server.log
        assert_gone(list(children.values()), server.port)


async def test_the_drain_timeout_cuts_all_fronts_with_an_error(endless_model: Path, tmp_path: Path) -> None:
    with serve(*args(endless_model), log=tmp_path / "log") as server:
        children = pids(server)
        async with session() as client:
            streams = start_streams(client, server)
            await wait_running(server, 3)
            begin = time.monotonic()
            server.process.terminate()
            assert await outcomes(streams) == ["error"] * 3
            assert 0.8 < time.monotonic() - begin < 4
        assert server.process.wait(10) == 0
        assert "cut=3" in server.log
        assert_gone(list(children.values()), server.port)


async def test_a_killed_parent_leaves_nothing_behind(endless_model: Path, tmp_path: Path) -> None:
    with serve(*args(endless_model), log=tmp_path / "log") as server:
        children = pids(server)
        for name, pid in children.items():
            if name.startswith("front"):
                os.kill(pid, signal.SIGTERM)  # changes nothing
        assert server.chat("hello", max_tokens=2)[0] == 200
        assert pids(server) == children
        server.process.kill()
        server.process.wait()
        assert_gone(list(children.values()), server.port)
