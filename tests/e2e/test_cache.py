"""The prefix cache over HTTP: usage, salts, pins, flush, the full queue, KV events, record and replay."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest
import zmq

from tests.support.server import Server, serve
from tests.support.streaming import session, stream_chat

ROOT = Path(__file__).resolve().parents[2]
LONG = "The quick brown fox jumps over the lazy dog. " * 20


def cached(body: dict) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_cached_tokens_are_told_as_they_are(tiny_server: Server) -> None:
    text = LONG + str(random.random())
    first, second = (tiny_server.chat(text, max_tokens=4)[1] for _ in range(2))
    prompt = first["usage"]["prompt_tokens"]
    assert cached(first) < prompt / 2
    assert prompt / 2 < cached(second) < prompt
    assert cached(second) % 16 == 0
    assert first["choices"][0]["message"] == second["choices"][0]["message"]
    salted = tiny_server.chat(text, max_tokens=4, cache_salt="tenant")[1]
    assert cached(salted) == 0


async def test_a_stream_tells_cached_tokens_too(tiny_server: Server) -> None:
    async with session() as http:
        text = LONG + str(random.random())
        await stream_chat(http, tiny_server.url, text, max_tokens=4)
        answer = await stream_chat(http, tiny_server.url, text, max_tokens=4)
        assert answer.usage is not None
        assert answer.usage["prompt_tokens_details"]["cached_tokens"] > answer.usage["prompt_tokens"] / 2


def test_pin_unpin_and_flush(tiny_server: Server) -> None:
    text = "pinned " * 60 + str(random.random())
    post = tiny_server.request
    messages = {"messages": [{"role": "user", "content": text}]}
    status, body = post("POST", "/pin_prefix", messages)
    assert status == 400
    assert "cached" in body["error"]["message"]
    assert tiny_server.chat(text, max_tokens=2)[0] == 200
    status, body = post("POST", "/pin_prefix", {**messages, "ttl_s": 60})
    assert status == 200
    assert body["tokens"] > 100
    assert post("POST", "/flush_cache")[0] == 200  # lets pins go, too
    assert post("POST", "/unpin_prefix", {"pin_id": body["pin_id"]})[0] == 400
    assert cached(tiny_server.chat(text, max_tokens=2)[1]) == 0
    for wrong in ({}, {"text": "a", "input_ids": [1]}, {"text": "a", "ttl_s": -1}, {"input_ids": [-5]}, {"text": 5}):
        status, body = post("POST", "/pin_prefix", wrong)
        assert status == 400, wrong
        assert body["error"]["message"]
    tiny_server.wait_idle()


def test_a_full_queue_answers_429(endless_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(endless_model), "--device", "null", "--max-running-requests", "1")
    with serve(*args, "--max-queued-requests", "2", log=tmp_path / "log") as server:

        def ask() -> None:
            with contextlib.suppress(http.client.HTTPException, OSError):  # the server is killed under it
                server.chat("Go on", max_tokens=900_000, ignore_eos=True)

        for _ in range(3):
            threading.Thread(target=ask, daemon=True).start()
        server.until(lambda: server.scheduler()["waiting"] == 2, "have two waiting requests", timeout_s=10)
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
        connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        response = connection.getresponse()
        assert response.status == 429
        assert int(response.headers["Retry-After"]) >= 1
        connection.close()


def replay(path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "replay.py"), str(path)]
    return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False)


@pytest.mark.parametrize("device", ["cpu", "delayed"])
async def test_a_record_replays_to_the_same_plans(tiny_model: Path, tmp_path: Path, device: str) -> None:
    record = tmp_path / "record"
    args = ("--model", str(tiny_model), "--device", device, "--max-total-tokens", "512", "--schedule-policy", "lpm")
    with serve(*args, "--record", str(record), log=tmp_path / "log") as server:
        async with session() as http:
            await asyncio.gather(
                *(
                    stream_chat(
                        http,
                        server.url,
                        f"secret-{i % 3} " * (5 + i),
                        max_tokens=5 + 3 * i,
                        stop=["secret-stop"],
                        abort_after=4 if i % 4 == 3 else None,
                    )
                    for i in range(16)
                )
            )
        await asyncio.to_thread(server.wait_idle)
        assert server.stop() == 0
    data = record.read_bytes()
    assert b"secret" not in data
    done = await asyncio.to_thread(replay, record)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "every plan is the recorded one" in done.stdout
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    assert (await asyncio.to_thread(replay, tmp_path / "cut")).returncode == 0
    assert (await asyncio.to_thread(replay, tmp_path / "log")).returncode == 2


def test_kv_events_are_published(tiny_model: Path, tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    ctx = zmq.Context()
    listener = ctx.socket(zmq.SUB)
    listener.setsockopt(zmq.SUBSCRIBE, b"kv-events")
    listener.setsockopt(zmq.RCVTIMEO, 10_000)
    try:
        args = ("--model", str(tiny_model), "--device", "null", "--kv-events-endpoint", endpoint)
        with serve(*args, log=tmp_path / "log") as server:
            listener.connect(endpoint)
            server.chat(LONG, max_tokens=2)
            for attempt in range(20):  # a subscription takes effect a moment after connect
                server.chat(f"{attempt} {LONG}", max_tokens=2)
                if listener.poll(200):
                    break
            topic, sequence, data = listener.recv_multipart()
            assert topic == b"kv-events"
            assert len(sequence) == 8
            batch = msgspec.msgpack.decode(data)
            assert batch[1][0][0] == "BlockStored"
    finally:
        ctx.destroy(linger=0)
