"""Clients that leave, wait or stall, and the headers around every answer."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import pytest

from engine.server import body, sse
from tests.support.fake_client import FakeClient
from tests.unit.server.support import CHAT, HELLO, Http, expect_error, post, read_events


async def raw_post(http: Http, body: dict[str, object]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stage", ["before_accept", "after_texts"])
async def test_a_client_that_leaves_ends_its_request(
    http: Http, fake: FakeClient, caplog: pytest.LogCaptureFixture, stream: bool, stage: str
) -> None:
    fake.script.hang_before_accept = stage == "before_accept"
    fake.script.hang_after_texts = True
    _, writer = await raw_post(http, {**HELLO, "stream": stream})
    await asyncio.wait_for(fake.started.wait(), 2)
    await asyncio.sleep(0.02)
    assert not fake.generations[0].closed
    writer.transport.abort()
    await asyncio.wait_for(fake.closed.wait(), 2)
    await asyncio.sleep(0.02)
    assert fake.in_flight == 0
    assert "Traceback" not in caplog.text
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_client_that_leaves_while_text_flows(
    http: Http, fake: FakeClient, caplog: pytest.LogCaptureFixture
) -> None:
    fake.script.texts = ["word " * 50] * 100_000
    reader, writer = await raw_post(http, {**HELLO, "stream": True})
    assert b"word" in await reader.readuntil(b"word")
    writer.transport.abort()
    await asyncio.wait_for(fake.closed.wait(), 2)
    await asyncio.sleep(0.02)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


async def test_a_reader_that_stalls_loses_the_connection(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALLED_S", 0.2)
    fake.script.texts = ["word " * 5000] * 100_000
    reader, writer = await raw_post(http, {**HELLO, "stream": True})
    await reader.readuntil(b"word")
    writer.transport.pause_reading()  # ty: ignore[unresolved-attribute]
    await asyncio.wait_for(fake.closed.wait(), 5)
    assert fake.in_flight == 0
    writer.transport.abort()


async def test_a_reader_that_is_slow_keeps_the_connection(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "STALLED_S", 0.3)
    # One event that takes the reader longer than STALLED_S, and more than the kernel's buffers hold.
    text = "word " * 4_000_000
    fake.script.texts = [text]
    reader, writer = await raw_post(http, {**HELLO, "stream": True})
    begin, size = time.monotonic(), 0
    while part := await reader.read(2**18):
        size += len(part)
        if part.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            break
        await asyncio.sleep(0.015)
    assert size > len(text)
    assert time.monotonic() - begin > 2 * sse.STALLED_S
    writer.close()


async def test_silence_is_filled_with_comments(http: Http, fake: FakeClient) -> None:
    fake.script.texts = ["a", "b"]
    fake.script.pause_s = 0.18
    response = await post(http, {**HELLO, "stream": True})
    text = (await response.read()).decode()
    assert 2 <= text.count(": keep-alive\n\n") <= 8
    assert text.endswith("data: [DONE]\n\n")
    assert text.index('"role":"assistant"') < text.index(": keep-alive") < text.index('"content":"a"')


async def test_headers_come_before_the_first_token(http: Http, fake: FakeClient) -> None:
    fake.script.texts = []
    fake.script.hang_after_texts = True
    response = await asyncio.wait_for(post(http, {**HELLO, "stream": True}), 2)
    assert response.status == 200
    assert b'"role":"assistant"' in await asyncio.wait_for(response.content.readuntil(b"\n\n"), 2)
    response.close()


async def test_many_streams_at_once(http: Http, fake: FakeClient) -> None:
    fake.script.texts = [f"{idx} " for idx in range(20)]

    async def one() -> str:
        events = await read_events(await post(http, {**HELLO, "stream": True}))
        return "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])

    texts = await asyncio.gather(*(one() for _ in range(60)))
    assert set(texts) == {"".join(fake.script.texts)}
    assert fake.in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_clients_request_id_comes_back(http: Http, fake: FakeClient, stream: bool) -> None:
    response = await post(http, {**HELLO, "stream": stream, "rid": "mine"}, **{"x-request-id": "trace-1"})
    assert response.headers["x-request-id"] == "trace-1"
    assert fake.asked[0].label == "mine"
    response = await post(http, {**HELLO, "stream": stream}, **{"x-request-id": "trace-2"})
    assert response.headers["x-request-id"] == fake.asked[1].label == "trace-2"
    response = await post(http, {**HELLO, "stream": stream, "rid": "mine"})
    assert response.headers["x-request-id"] == fake.asked[2].label == "mine"


@pytest.mark.parametrize("given", ["", "x" * 129, "caf\u00e9", "tab\tin", None])
async def test_other_request_ids_are_replaced(http: Http, fake: FakeClient, given: str | None) -> None:
    response = await post(http, HELLO, **({} if given is None else {"x-request-id": given}))
    made = response.headers["x-request-id"]
    assert made != given
    assert len(made) == 32
    assert fake.asked[0].label == made


async def test_errors_carry_the_request_id_too(http: Http) -> None:
    response = await http.get("/nowhere", headers={"x-request-id": "trace-3"})
    assert response.headers["x-request-id"] == "trace-3"
    await expect_error(response, 404)


async def test_browsers(http: Http) -> None:
    response = await http.options(CHAT, headers={"Origin": "http://x", "Access-Control-Request-Method": "POST"})
    assert response.status == 204
    assert response.headers["Access-Control-Allow-Origin"] == "*"
    assert "POST" in response.headers["Access-Control-Allow-Methods"]
    assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
    answer = await post(http, {**HELLO, "stream": True}, Origin="http://x")
    assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_a_body_that_does_not_go_on_is_given_up(
    http: Http, fake: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_PAUSE_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)
    assert b" 408 " in answer
    writer.close()
    assert fake.in_flight == 0
