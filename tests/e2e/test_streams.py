"""Many streams at once: each equals its unstreamed text, whatever runs beside it; aborts free everything."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.support.server import Server, serve
from tests.support.streaming import session, stream_chat

PROMPTS = ["Tell me about rivers. ", "Ünïcödé, 日本語 and emoji 👩‍👩‍👧‍👦! ", "x = [i for i in range(10)]\n", "Why? "]


def requests(count: int) -> list[dict]:
    """Chats of many lengths, greedy and seeded, some with stop strings."""
    made = []
    for index in range(count):
        fields: dict = {"max_tokens": 1 + (index * 7) % 48}
        if index % 3 == 1:
            fields.update(temperature=0.9, top_p=0.9, seed=index)
        if index % 4 == 2:
            fields["stop"] = ["e", "zq"][: 1 + index % 2]
        made.append({"text": PROMPTS[index % 4] * (1 + index % 9), **fields})
    return made


async def plain(http: object, url: str, fields: dict) -> dict:
    body = {"messages": [{"role": "user", "content": fields["text"]}], "temperature": 0, **fields}
    del body["text"]
    async with http.post(f"{url}/v1/chat/completions", json=body) as response:  # type: ignore[attr-defined]
        assert response.status == 200, await response.text()
        return await response.json()


async def check_streams(server: Server, count: int, *, aborts: bool = False) -> None:
    """Run all alone, then all together, streamed and not; with `aborts` random ones go away in between."""
    rng = random.Random(count)
    made = requests(count)
    async with session() as http:
        alone = [await plain(http, server.url, fields) for fields in made]
        streams = [stream_chat(http, server.url, **fields) for fields in made]
        if aborts:
            streams += [
                stream_chat(http, server.url, **{**fields, "max_tokens": 200}, abort_after=rng.randint(1, 12))
                for fields in made
            ]
            rng.shuffle(order := list(range(len(streams))))
            results = dict(zip(order, await asyncio.gather(*(streams[i] for i in order)), strict=True))
            answers = [results[i] for i in range(count)]
        else:
            answers = await asyncio.gather(*streams)
    for whole, streamed in zip(alone, answers, strict=True):
        (choice,) = whole["choices"]
        assert streamed.error is None
        assert streamed.text == choice["message"]["content"]
        assert streamed.finish == choice["finish_reason"]
        assert streamed.usage["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert streamed.usage["prompt_tokens"] == whole["usage"]["prompt_tokens"]
        assert streamed.done
    server.wait_idle()


async def test_sixty_four_streams_equal_their_unstreamed_texts(tiny_server: Server) -> None:
    await check_streams(tiny_server, 64)


@pytest.mark.parametrize("depth", [1, 2])
async def test_streams_on_the_delayed_device_under_random_aborts(tiny_model: Path, tmp_path: Path, depth: int) -> None:
    args = ("--model", str(tiny_model), "--device", "delayed", "--overlap-depth", str(depth))
    # 1,024 tokens of KV for up to 128 requests: pages are reused all the time, and requests are retracted.
    with serve(*args, "--max-total-tokens", "1024", log=tmp_path / "log") as server:
        await check_streams(server, 64, aborts=True)
        assert server.stop() == 0
        assert "Traceback" not in server.log


async def test_a_dropped_connection_frees_its_request(tiny_server: Server) -> None:
    async with session() as http:
        for stream in (True, False):
            before = tiny_server.scheduler()["step"]
            task = asyncio.create_task(
                stream_chat(http, tiny_server.url, "Go on", max_tokens=1900, ignore_eos=True)
                if stream
                else plain(http, tiny_server.url, {"text": "Go on", "max_tokens": 1900, "ignore_eos": True})
            )
            while tiny_server.scheduler()["running"] == 0:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.sleep(0.05)
            stats = await asyncio.to_thread(tiny_server.wait_idle)
            assert stats["step"] - before < 1500


async def test_requests_queued_and_mid_prefill_are_freed_too(tiny_model: Path, tmp_path: Path) -> None:
    args = ("--model", str(tiny_model), "--max-running-requests", "1", "--chunked-prefill-size", "8")
    with serve(*args, "--max-total-tokens", "4096", log=tmp_path / "log") as server:
        async with session() as http:
            tasks = [
                asyncio.create_task(
                    stream_chat(http, server.url, "long prompt " * 120, max_tokens=300, ignore_eos=True)
                )
                for _ in range(4)
            ]
            while server.scheduler()["waiting"] < 3:
                await asyncio.sleep(0.01)
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0.05)
            await asyncio.to_thread(server.wait_idle)
            status, _ = await asyncio.to_thread(server.chat, "still there?", max_tokens=3)
            assert status == 200
