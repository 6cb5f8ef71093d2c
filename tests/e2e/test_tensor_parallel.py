"""`--tp-size 2`: the same answers as from one process, and what happens when a rank dies."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.test_life import assert_gone
from tests.support.server import Server, serve
from tests.support.streaming import session, stream_chat
from tests.support.tiny_models import write_tiny_model

RANK = "scheduler 0 rank 1"
REQUESTS: tuple[dict, ...] = (
    {"max_tokens": 40, "logprobs": True, "top_logprobs": 3},
    {"max_tokens": 40, "temperature": 0.9, "top_p": 0.9, "seed": 7},
    {"max_tokens": 40, "frequency_penalty": 1.5, "logit_bias": {"30": 4.0}},
    {"max_tokens": 40, "n": 3, "temperature": 1.0, "seed": 3},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three query heads for each of two key heads, and a vocabulary that two cannot share evenly."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96, "vocab_size": 403}
    return write_tiny_model(tmp_path_factory.mktemp("model"), "qwen3", **shape)


def args(model: Path, size: int) -> tuple[str, ...]:
    options = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--chunked-prefill-size", "32")
    return ("--model", str(model), "--tp-size", str(size), *options)


def processes(server: Server) -> dict[str, int]:
    """Whole name -> pid."""
    found = {}
    for child in psutil.Process(server.process.pid).children():
        title = " ".join(child.cmdline())
        if title.startswith("engine: "):
            found[title.removeprefix("engine: ").strip()] = child.pid
    return found


def answers(server: Server) -> list[object]:
    """What the model says to each request, and to a prompt whose own logprobs are wanted."""
    said: list[object] = []
    for fields in REQUESTS:
        status, body = server.chat("A prompt that is longer than a chunk of a step: once more, and again.", **fields)
        assert status == 200, body
        said += [choice["message"]["content"] for choice in body["choices"]]
        said += [_logprobs(choice["logprobs"]["content"]) for choice in body["choices"] if choice.get("logprobs")]
    echo = {"prompt": "Echo this " * 6, "max_tokens": 4, "temperature": 0, "echo": True, "logprobs": 2}
    status, body = server.request("POST", "/v1/completions", echo)
    assert status == 200, body
    (choice,) = body["choices"]
    return [*said, choice["text"], [round(p or 0.0, 3) for p in choice["logprobs"]["token_logprobs"]]]


def _logprobs(content: list[dict]) -> list[tuple[str, float]]:
    return [(token["token"], round(token["logprob"], 3)) for token in content]


async def test_two_ranks_say_what_one_says_until_one_is_killed(model: Path, tmp_path: Path) -> None:
    with serve(*args(model, 1), log=tmp_path / "one") as server:
        expected = await asyncio.to_thread(answers, server)
        assert server.stop() == 0
    with serve(*args(model, 2), log=tmp_path / "two") as server:
        assert await asyncio.to_thread(answers, server) == expected
        status, health = server.get("/health")
        assert status == 200
        steps = {process["name"]: process["step"] for process in health["processes"]}
        assert steps[RANK] == steps["scheduler 0"] > 0
        found = processes(server)
        listening = [c.laddr.ip for pid in found.values() for c in _listening(pid)]
        assert set(listening) <= {"127.0.0.1", "::1"}
        assert "Traceback" not in server.log
        await kill_amid_a_stream(server, found[RANK])
        assert server.process.wait(15) != 0
        assert_gone(list(found.values()), server.port)


def test_two_ranks_stop_in_order(model: Path, tmp_path: Path) -> None:
    with serve(*args(model, 2), log=tmp_path / "log") as server:
        assert server.chat("Hello", max_tokens=4)[0] == 200
        assert server.stop() == 0
        assert "Traceback" not in server.log
        assert "ERROR" not in server.log


def _listening(pid: int) -> list:
    return [c for c in psutil.Process(pid).net_connections() if c.status == psutil.CONN_LISTEN]


async def kill_amid_a_stream(server: Server, pid: int) -> None:
    """Kill `pid` while a stream runs, which must end with an error."""
    async with session() as http:
        stream = asyncio.create_task(stream_chat(http, server.url, "Go on", max_tokens=1500, ignore_eos=True))
        while not server.scheduler()["running"]:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        answer = await stream
        assert answer.error is not None
        assert "scheduler" in answer.error["message"]


@pytest.mark.slow
async def test_a_killed_rank_is_started_again_with_the_others(model: Path, tmp_path: Path) -> None:
    with serve(*args(model, 2), "--on-crash", "restart", log=tmp_path / "log") as server:
        before = server.chat("again", max_tokens=8)[1]["choices"][0]["message"]
        for victim in (RANK, "scheduler 0"):
            found = processes(server)
            await kill_amid_a_stream(server, found[victim])
            server.until(lambda: server.get("/health")[0] == 200, "recover")
            assert not set(found.values()) & set(processes(server).values())
            assert server.chat("again", max_tokens=8)[1]["choices"][0]["message"] == before
        assert server.stop() == 0


def test_a_model_that_cannot_be_shared_is_refused(model: Path, tmp_path: Path) -> None:
    with serve(*args(model, 4), log=tmp_path / "log", ready=False) as server:
        assert server.process.wait(60) == 2
        assert "--tp-size 4 cannot share 6 heads" in server.log
