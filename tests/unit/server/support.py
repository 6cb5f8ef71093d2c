"""What the server's tests share: sending a chat, reading a stream, checking an error."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient

Http = TestClient[web.Request, web.Application]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


async def post(http: Http, body: dict[str, Any] | bytes, **headers: str) -> ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(CHAT, data=data, headers={"Content-Type": "application/json", **headers})


async def read_events(response: ClientResponse) -> list[Any]:
    """The JSON of each event, "[DONE]" as it is; comments dropped. Checks the framing."""
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: ")
        assert "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def expect_error(
    response: ClientResponse, status: int, param: str | None = None, part: str = ""
) -> dict[str, Any]:
    """The OpenAI error object of a response with this status."""
    raw = await response.read()
    assert response.status == status, raw
    assert len(raw) < 4096
    assert response.headers["Content-Type"].startswith("application/json")
    body = json.loads(raw)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["param"] == param, body
    assert part in body["error"]["message"], body
    return body["error"]
