"""Generation: one request in flight, seen from a face."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from engine.errors import EngineError, InternalError
from engine.ipc.messages import Ended, TextDelta, unpack_i32

log = logging.getLogger(__name__)


class Delta(msgspec.Struct):
    """New output of one request; pieces that came while nobody read are merged."""

    text: str
    token_ids: list[int]


class Generation:
    """One request in flight. Iterate it for its output; `close` it in any case."""

    def __init__(self, request: int, attempt: int, label: str, release: Callable[[Generation], None]) -> None:
        self.request = request
        self.attempt = attempt
        self.label = label
        self.ended: Ended | None = None
        self._release = release
        self._error: EngineError | None = None
        self._num_prompt_tokens: int | None = None
        self._num_tokens = 0
        self._text: list[str] = []
        self._ids: list[int] = []
        self._waiter: asyncio.Future[None] | None = None

    async def accepted(self) -> int:
        """Wait until the scheduler has queued the request; its prompt tokens. Raises EngineError if refused."""
        while self._num_prompt_tokens is None and self._error is None and self.ended is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        return self._num_prompt_tokens or 0

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield output until the request has ended; raises EngineError if it ended with an error."""
        while True:
            if self._ids or self._text:
                delta = Delta("".join(self._text), self._ids)
                self._text, self._ids = [], []
                yield delta
            elif self._error is not None:
                raise self._error
            elif self.ended is not None:
                return
            else:
                await self._wait()

    def close(self) -> None:
        """Let go of the request; aborts it if it has not ended."""
        self._release(self)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the client tells it.

    def on_accepted(self, num_prompt_tokens: int) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._wake()

    def on_delta(self, delta: TextDelta) -> int | None:
        """Take a delta; the index of the first missing token if some came not, else None."""
        if delta.first_token > self._num_tokens:
            return self._num_tokens
        if delta.first_token < self._num_tokens:
            return None  # here already
        ids = unpack_i32(delta.token_ids).tolist()
        self._num_tokens += len(ids)
        self._ids.extend(ids)
        if delta.text:
            self._text.append(delta.text)
        self._wake()
        return None

    def on_ended(self, ended: Ended) -> None:
        if ended.num_tokens != self._num_tokens and ended.num_prompt_tokens:
            log.error("event=output_lost request=%d have=%d of=%d", self.request, self._num_tokens, ended.num_tokens)
            self._error = InternalError("A part of this request's output was lost.")
        self.ended = ended
        self._wake()

    def on_error(self, error: EngineError) -> None:
        self._error = error
        self._wake()
