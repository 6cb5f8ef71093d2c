"""A server whose answers are scripted: when each chunk is sent, how the bytes are cut, and what goes wrong.

It notes when it sends what, so that a client's times can be held against the truth.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from types import TracebackType
from typing import Literal, NamedTuple, Self

from aiohttp import web

from engine.bench.job import ROUTES, Endpoint

Ending = Literal["done", "no usage", "error event", "cut", "reset", "status 500", "hang"]

_PROMPT_TOKENS, _CACHED_TOKENS = 7, 3
_clock = time.monotonic


class Script(NamedTuple):
    """One answer. Nothing but the chunks that `gaps_s` times brings text."""

    gaps_s: list[float]
    """Before each chunk with text, after what came before it; the first after a chunk without text."""
    ending: Ending = "done"
    crlf: bool = False
    """Lines end as they do in HTTP."""
    halved: bool = False
    """Each event is sent in two pieces."""


class Truth:
    """When the server did what, in seconds of CLOCK_MONOTONIC."""

    def __init__(self) -> None:
        self.entered = 0.0
        """The request was there."""
        self.sent: list[float] = []
        """The last byte of each chunk with text was handed over."""
        self.done = 0.0
        """So was [DONE]."""


class FakeServer:
    """Serves in a thread while its context is open. Script i answers the request whose x-request-id ends in -i."""

    def __init__(self, scripts: list[Script]) -> None:
        self.scripts = scripts
        self.truths = [Truth() for _ in scripts]
        self.bodies: dict[int, dict] = {}
        """What was asked, by script."""
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application()
        for endpoint, route in ROUTES.items():
            app.router.add_post(route, _Route(self, endpoint).answer)
        app.router.add_get("/v1/models", _models)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()


async def _models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "fake"}]})


class _Route:
    """One endpoint."""

    def __init__(self, server: FakeServer, endpoint: Endpoint) -> None:
        self._server = server
        self._endpoint: Endpoint = endpoint

    async def answer(self, request: web.Request) -> web.StreamResponse:
        entered = _clock()
        index = int(request.headers["x-request-id"].rpartition("-")[2])
        script, truth = self._server.scripts[index], self._server.truths[index]
        truth.entered = entered
        self._server.bodies[index] = await request.json()
        if script.ending == "status 500":
            return web.json_response({"error": {"message": "scripted"}}, status=500)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._play(_Writer(response, script), script, truth)
        if script.ending == "reset":
            assert request.transport is not None
            request.transport.abort()
        return response

    async def _play(self, out: _Writer, script: Script, truth: Truth) -> None:
        await out.raw(b": a comment\n\n")
        if self._endpoint != "generate":
            await out.event(self._chunk(""))
        # Unless it is to end well, the stream stops halfway.
        count = len(script.gaps_s) if script.ending in ("done", "no usage") else len(script.gaps_s) // 2
        text = ""
        for gap_s in script.gaps_s[:count]:
            await asyncio.sleep(gap_s)
            text = text + "a" if self._endpoint == "generate" else 'say "text":"x" \\'
            truth.sent.append(await out.event(self._chunk(text)))
        if script.ending == "hang":
            await asyncio.Event().wait()
        if script.ending == "error event":
            await out.event({"error": {"message": "scripted", "code": 500}})
        if script.ending == "done" and self._endpoint != "generate":
            usage = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": len(script.gaps_s)}
            details = {"prompt_tokens_details": {"cached_tokens": _CACHED_TOKENS}}
            await out.event({"choices": [], "usage": {**usage, **details}})
        if script.ending in ("done", "no usage"):
            truth.done = await out.raw(b"data: [DONE]\n\n")

    def _chunk(self, text: str) -> dict[str, object]:
        if self._endpoint == "chat":
            delta = {"content": text} if text else {"role": "assistant", "content": ""}
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], "usage": None}
        if self._endpoint == "completions":
            return {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None}
        counts = {"prompt_tokens": _PROMPT_TOKENS, "completion_tokens": len(text), "cached_tokens": _CACHED_TOKENS}
        return {"text": text, "meta_info": {"finish_reason": None, **counts}}


class _Writer:
    """Sends events cut and framed as the script says."""

    def __init__(self, response: web.StreamResponse, script: Script) -> None:
        self._response = response
        self._script = script

    async def event(self, payload: dict[str, object]) -> float:
        """When its last byte was handed over."""
        return await self.raw(b"data: " + json.dumps(payload).encode() + b"\n\n")

    async def raw(self, data: bytes) -> float:
        if self._script.crlf:
            data = data.replace(b"\n", b"\r\n")
        if self._script.halved:
            # With CRLF this falls between the last two characters, the nastiest place.
            middle = len(data) - 1 if self._script.crlf else len(data) // 2
            await self._response.write(data[:middle])
            await asyncio.sleep(0.002)
            data = data[middle:]
        now = _clock()
        await self._response.write(data)
        return now
