"""What the server's tests share: sending a chat, reading a stream, checking an error."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import ClientResponse, web
from aiohttp.test_utils import TestClient

Http = TestClient[web.Request, web.Application]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}]}


async def post(http: Http, body: dict[str, Any] | bytes, **headers: str) -> ClientResponse:
    return await _post(http, CHAT, body, headers)


async def complete(http: Http, body: dict[str, Any] | bytes, **headers: str) -> ClientResponse:
    return await _post(http, COMPLETIONS, body, headers)


async def _post(http: Http, path: str, body: dict[str, Any] | bytes, headers: dict[str, str]) -> ClientResponse:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await http.post(path, data=data, headers={"Content-Type": "application/json", **headers})


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


def joined(events: list[Any]) -> list[dict[str, Any]]:
    """The choices of a stream as a plain answer would give them, in the order of their indices. Checks the framing."""
    assert events[-1] == "[DONE]"
    chunks = [event for event in events[:-1] if event["choices"]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        index = part["index"]
        choice = found.setdefault(index, {"index": index, "text": "", "logprobs": None, "finish_reason": None})
        assert choice["finish_reason"] is None, "a chunk after the finish"
        choice["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
        if part["logprobs"] is not None:
            choice["logprobs"] = _extended(choice["logprobs"], part["logprobs"])
        if part["finish_reason"] is not None:
            choice |= {name: part[name] for name in ("finish_reason", "matched_stop", "stop_reason")}
    return [found[index] for index in sorted(found)]


def _extended(logprobs: dict[str, Any] | None, more: dict[str, Any]) -> dict[str, Any]:
    if logprobs is None:
        return more
    return {name: value if value is None else value + more[name] for name, value in logprobs.items()}


def plain(body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a plain answer in the form of `joined`."""
    names = ("index", "logprobs", "finish_reason", "matched_stop", "stop_reason")
    return [
        {name: choice[name] for name in names}
        | {"text": choice["message"]["content"] if "message" in choice else choice["text"]}
        for choice in body["choices"]
    ]


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
