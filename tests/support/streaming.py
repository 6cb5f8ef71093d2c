"""An asyncio client for streamed chats."""

from __future__ import annotations

import json

import aiohttp


class Answer:
    """A streamed answer, put together."""

    def __init__(self) -> None:
        self.text = ""
        self.events: list[dict] = []
        self.finish: str | None = None
        self.usage: dict | None = None
        self.done = False
        self.error: dict | None = None
        self.status = 0


async def stream_chat(
    session: aiohttp.ClientSession, url: str, text: str, *, abort_after: int | None = None, **fields: object
) -> Answer:
    """Stream one chat; with `abort_after` the connection is closed after so many events."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    answer = Answer()
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        answer.status = response.status
        if response.status != 200:
            answer.error = (await response.json())["error"]
            return answer
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                answer.done = True
                continue
            event = json.loads(data.decode())
            answer.events.append(event)
            if "error" in event:
                answer.error = event["error"]
                continue
            if event.get("usage"):
                answer.usage = event["usage"]
            for choice in event["choices"]:
                answer.text += choice["delta"].get("content") or ""
                answer.finish = choice["finish_reason"] or answer.finish
            if abort_after is not None and len(answer.events) >= abort_after:
                response.close()
                return answer
    return answer


def session() -> aiohttp.ClientSession:
    """A session without a limit on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=100), read_bufsize=2**20
    )
