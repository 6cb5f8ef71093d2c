"""Start, crash, restart, drain: what clients see, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.support.server import Server, serve
from tests.support.streaming import Answer, session, stream_chat


def null_args(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--device", "null", "--drain-timeout", "2")


async def wait_running(server: Server, count: int) -> None:
    while server.scheduler()["running"] < count:
        await asyncio.sleep(0.01)


def assert_gone(pids: list[int], port: int) -> None:
    """No process of the start is left and the port can be taken again."""
    deadline = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline, "orphans"
        time.sleep(0.02)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


async def run_and_kill(server: Server, pid: int, sig: int = signal.SIGKILL) -> tuple[Answer, tuple[int, dict], float]:
    """Kill `pid` under a stream and a plain request; what these got, and seconds until /health said 503."""
    async with session() as http:
        stream = asyncio.create_task(stream_chat(http, server.url, "Go on", max_tokens=900_000, ignore_eos=True))
        whole = asyncio.create_task(asyncio.to_thread(server.chat, "Go on", max_tokens=900_000, ignore_eos=True))
        await wait_running(server, 2)
        killed = time.monotonic()
        os.kill(pid, sig)
        while (await asyncio.to_thread(server.get, "/health"))[0] == 200:
            await asyncio.sleep(0.01)
        unhealthy = time.monotonic() - killed
        return await stream, await whole, unhealthy


@pytest.mark.parametrize("victim", ["scheduler", "tokenizer", "detokenizer"])
async def test_a_killed_process_ends_requests_with_an_error_and_the_server(
    endless_model: Path, tmp_path: Path, victim: str
) -> None:
    with serve(*null_args(endless_model), log=tmp_path / "log") as server:
        children = server.children()
        assert set(children) == {"scheduler", "tokenizer", "detokenizer"}
        answer, (status, body), unhealthy = await run_and_kill(server, children[victim])
        assert answer.error is not None
        assert victim in answer.error["message"]
        assert status == 500
        assert victim in body["error"]["message"]
        assert unhealthy < 1.0
        assert server.process.wait(10) != 0
        assert_gone(list(children.values()), server.port)


async def test_a_killed_parent_leaves_nothing_behind(endless_model: Path, tmp_path: Path) -> None:
    with serve(*null_args(endless_model), log=tmp_path / "log") as server:
        children = server.children()
        server.process.kill()
        server.process.wait()
        assert_gone(list(children.values()), server.port)


async def test_restart_serves_again_after_every_crash(endless_model: Path, tmp_path: Path) -> None:
    with serve(*null_args(endless_model), "--on-crash", "restart", log=tmp_path / "log") as server:
        for victim in ("scheduler", "detokenizer"):
            children = server.children()
            answer, (status, _), unhealthy = await run_and_kill(server, children[victim])
            assert answer.error is not None
            assert status == 500
            assert unhealthy < 1.0
            server.until(lambda: server.get("/health")[0] == 200, "recover")
            assert server.chat("again", max_tokens=3)[0] == 200
            assert not set(children.values()) & set(server.children().values())
        assert server.stop() == 0


async def test_a_hung_scheduler_turns_health_and_recovers(endless_model: Path, tmp_path: Path) -> None:
    with serve(*null_args(endless_model), log=tmp_path / "log") as server:
        pid = server.children()["scheduler"]
        os.kill(pid, signal.SIGSTOP)
        try:
            server.until(lambda: server.get("/health")[0] == 503, "notice", timeout_s=8)
            assert "silent" in server.get("/health")[1]["reason"]
        finally:
            os.kill(pid, signal.SIGCONT)
        server.until(lambda: server.get("/health")[0] == 200, "recover", timeout_s=5)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
async def test_drain_finishes_what_runs_and_refuses_what_is_new(tiny_model: Path, tmp_path: Path, sig: int) -> None:
    args = ("--model", str(tiny_model), "--max-total-tokens", "4096", "--drain-timeout", "30")
    with serve(*args, log=tmp_path / "log") as server:
        children = server.children()
        async with session() as http:
            running = asyncio.create_task(stream_chat(http, server.url, "Go on", max_tokens=400, ignore_eos=True))
            await wait_running(server, 1)
            os.kill(server.process.pid, sig)
            await asyncio.sleep(0.1)
            body = {"messages": [{"role": "user", "content": "new"}]}
            async with http.post(f"{server.url}/v1/chat/completions", json=body) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) > 0
            assert (await asyncio.to_thread(server.get, "/health"))[0] == 503
            answer = await running
            assert answer.error is None
            assert answer.usage["completion_tokens"] == 400
            assert answer.done
        assert server.process.wait(10) == 0
        assert_gone(list(children.values()), server.port)


async def test_a_sigterm_to_the_whole_group_still_drains(tiny_model: Path, tmp_path: Path) -> None:
    with serve("--model", str(tiny_model), "--max-total-tokens", "4096", log=tmp_path / "log") as server:
        async with session() as http:
            running = asyncio.create_task(stream_chat(http, server.url, "Go on", max_tokens=300, ignore_eos=True))
            await wait_running(server, 1)
            for pid in [*server.children().values(), server.process.pid]:
                os.kill(pid, signal.SIGTERM)
            answer = await running
            assert answer.usage["completion_tokens"] == 300
        assert server.process.wait(10) == 0


async def test_a_sigterm_to_one_child_changes_nothing(endless_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(endless_model), "--device", "null", "--drain-timeout", "0.1")
    with serve(*args, log=tmp_path / "log") as server:
        for pid in server.children().values():
            os.kill(pid, signal.SIGTERM)
        await asyncio.sleep(6)
        assert server.get("/health")[0] == 200
        assert server.chat("still there", max_tokens=3)[0] == 200
        assert server.stop() == 0


def test_broken_http_is_one_line_without_the_clients_bytes(tiny_server: Server) -> None:
    before = len(tiny_server.log)
    body = b"5\r\n{SECRETPROMPT}\r\n0\r\n\r\n"
    for data in (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body,
        b"GET / HTTP/1.1\r\nAuthorization: Bearer SECRETKEY\x01\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: SECRETHEADER" + b"y" * 9000 + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", tiny_server.port), timeout=10) as client:
            client.sendall(data)
            assert client.recv(4096).startswith(b"HTTP/1.")
    log = tiny_server.log[before:]
    assert "SECRET" not in log
    assert "Traceback" not in log


async def test_a_short_prompt_does_not_wait_for_a_long_one(tiny_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(tiny_model), "--chunked-prefill-size", "16", "--max-total-tokens", "8192")
    with serve(*args, log=tmp_path / "log") as server:
        async with session() as http:
            long = [
                asyncio.create_task(stream_chat(http, server.url, f"{i} " + "long prompt " * 150, max_tokens=1))
                for i in range(4)
            ]
            while server.scheduler()["running"] == 0:
                await asyncio.sleep(0.005)
            await stream_chat(http, server.url, "Hi", max_tokens=1)
            assert not any(task.done() for task in long)
            await asyncio.gather(*long)


async def test_the_drain_timeout_cuts_with_an_error(endless_model: Path, tmp_path: Path) -> None:
    with serve(*null_args(endless_model), log=tmp_path / "log") as server:
        async with session() as http:
            running = asyncio.create_task(stream_chat(http, server.url, "Go on", max_tokens=900_000, ignore_eos=True))
            await wait_running(server, 1)
            begin = time.monotonic()
            server.process.terminate()
            answer = await running
            assert answer.error is not None
            assert 1.5 < time.monotonic() - begin < 5
        assert server.process.wait(10) == 0


def test_health_says_starting_before_it_says_ok(tiny_model: Path, tmp_path: Path) -> None:
    with serve("--model", str(tiny_model), log=tmp_path / "log", ready=False) as server:
        server.wait_listening()
        status, body = server.get("/health")
        assert status == 503
        assert body["state"] == "starting"
        assert server.chat("hello")[0] == 503
        begin = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("args", "status", "words"),
    [
        (["--model", "/nowhere/at-all"], 3, "/nowhere/at-all"),
        (["--context-length", "100000"], 2, "2048"),
        (["--chat-template", "/nowhere.jinja"], 3, "/nowhere.jinja"),
        (["--max-running-requests", "0"], 2, "max-running-requests"),
        (["--max-total-tokens", "999999999999"], 2, "--max-total-tokens"),
        (["--page-size", "1024", "--max-total-tokens", "1000"], 2, "--page-size"),
        (["--tokenizer", "/nowhere.gguf"], 3, "/nowhere.gguf"),
    ],
)
def test_a_start_that_cannot_work_ends_with_one_sentence(
    tiny_model: Path, tmp_path: Path, args: list[str], status: int, words: str
) -> None:
    args = args if args[0] == "--model" else ["--model", str(tiny_model), "--device", "null", *args]
    with serve(*args, log=tmp_path / "log", ready=False) as server:
        assert server.process.wait(60) == status
        # The last line is for the person who typed the command.
        assert words in server.log.strip().splitlines()[-1]
        assert "Traceback" not in server.log


def test_a_taken_port_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with serve("--model", str(tiny_model), "--port", str(port), log=tmp_path / "log", ready=False) as server:
            assert server.process.wait(20) == 5
            assert str(port) in server.log
            assert "Traceback" not in server.log


def test_systemd_hears_ready_watchdog_and_stopping(endless_model: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(tmp_path / "notify"))
        notify.settimeout(10)
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "400000"}
        with serve(*null_args(endless_model), log=tmp_path / "log", env=environment) as server:
            heard: list[str] = []

            def until(word: str) -> None:
                while not any(word in message for message in heard):
                    heard.append(notify.recv(4096).decode())

            until("READY=1")
            after_ready = len(heard)
            until("WATCHDOG=1")
            assert after_ready <= len(heard)
            assert server.stop() == 0
            until("STOPPING=1")
            assert sum("READY=1" in message for message in heard) == 1


def test_two_tokenizers_share_the_requests(tiny_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(tiny_model), "--device", "null", "--tokenizer-workers", "2")
    with serve(*args, log=tmp_path / "log") as server:
        for index in range(4):
            assert server.chat(f"hello {index}", max_tokens=2)[0] == 200
        steps = {p["name"]: p["step"] for p in server.get("/health")[1]["processes"]}
        assert min(steps["tokenizer 0"], steps["tokenizer 1"]) >= 2


def test_options_come_from_a_file(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"model: {tiny_model}\ndevice: null\nserved-model-name: from-the-file\n")
    with serve("--config", str(tmp_path / "config.yaml"), log=tmp_path / "log") as server:
        assert server.get("/v1/models")[1]["data"][0]["id"] == "from-the-file"
        assert server.get("/server_info")[1]["config"]["device"] == "null"
