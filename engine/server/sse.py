"""Server-sent events: framing, keep-alive comments, and an end for readers that do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from aiohttp import web

from engine.errors import EngineError, InternalError
from engine.server.error_body import error_body
from engine.server.keys import REQUEST_ID

log = logging.getLogger("engine.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STALLED_S = 60.0
"""A reader that takes nothing for this long while our buffer is full loses the connection."""
TIMER_STEP_S = 0.002
"""Event loops round timers to milliseconds."""

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # Asks nginx not to collect the stream.
    "X-Accel-Buffering": "no",
}


def event(payload: bytes) -> bytes:
    """One event of a JSON payload (encoders escape line breaks, so one data line is enough)."""
    return b"data: " + payload + b"\n\n"


async def answer_with_events(
    request: web.Request,
    keep_alive_s: float,
    write: Callable[[EventStream], Awaitable[bytes]],
    let_go: Callable[[], None],
) -> web.StreamResponse:
    """A whole event stream: `write` sends its events and returns the last ones.

    What goes wrong in it is the last event, after `let_go` has ended what the stream was made from.
    """
    stream = EventStream(request, keep_alive_s)
    try:
        async with stream:
            try:
                last = await write(stream)
            except EngineError as error:
                let_go()
                last = _error_events(error)
            except ConnectionError:
                raise
            except Exception:
                log.exception("event=stream_failed request=%s", request[REQUEST_ID])
                let_go()
                text = f"Internal error; the server's log has it under request id {request[REQUEST_ID]}."
                last = _error_events(InternalError(text))
            await stream.finish(last)
    except ConnectionError:
        log.debug("event=client_gone request=%s", request[REQUEST_ID])
    return stream.response


def _error_events(error: EngineError) -> bytes:
    return event(error_body(error.info())) + DONE


class EventStream:
    """One SSE response. `send` takes framed events; raises ConnectionError once the client is gone."""

    def __init__(self, request: web.Request, keep_alive_s: float) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._loop = asyncio.get_running_loop()
        self._last_write = self._loop.time()
        self._stalled_since: float | None = None
        """While a write waits: when its reader last took something."""
        self._unsent_bytes = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._task = self._loop.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()

    async def send(self, events: bytes) -> None:
        """Write framed events; waits while the reader's buffer is full."""
        self._stalled_since = self._loop.time()
        await self.response.write(events)
        self._stalled_since = None
        self._last_write = self._loop.time()

    async def finish(self, events: bytes) -> None:
        """Write the last events and the end of the body in one piece."""
        self._stalled_since = self._loop.time()
        await self.response.write_eof(events)

    async def _watch(self) -> None:
        """Beside the writer: a comment where it is silent, the end where its reader stalls."""
        wait_s = self._keep_alive_s
        while True:
            await asyncio.sleep(wait_s)
            now = self._loop.time()
            wait_s = self._keep_alive_s
            if self._stalled_since is not None:
                if self._is_read():
                    self._stalled_since = now
                elif now - self._stalled_since > STALLED_S:
                    self._drop()
                    return
            elif (silence := now - self._last_write) < self._keep_alive_s - TIMER_STEP_S:
                wait_s -= silence
            elif self._all_sent():
                # Nothing is buffered, so this write does not wait and comes between two events.
                try:
                    await self.send(KEEP_ALIVE)
                except ConnectionError:
                    return

    def _is_read(self) -> bool:
        """The reader took something since the last look: slow is not stalled."""
        before, self._unsent_bytes = self._unsent_bytes, self._buffered()
        return self._unsent_bytes < before

    def _all_sent(self) -> bool:
        return self._buffered() == 0

    def _buffered(self) -> int:
        """Bytes that wait in this process for the reader; -1 without a connection."""
        transport = self._request.transport
        return -1 if transport is None else transport.get_write_buffer_size()

    def _drop(self) -> None:
        log.warning("event=reader_stalled request=%s seconds=%g", self._request[REQUEST_ID], STALLED_S)
        if self._request.transport is not None:
            self._request.transport.abort()
