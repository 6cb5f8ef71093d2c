"""Generation: one request in flight, seen from a face."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from engine.errors import EngineError, InternalError
from engine.ipc.messages import Ended, TextDelta, TokenLogprob, unpack_i32

log = logging.getLogger(__name__)

MOST_UNREAD_BYTES = 2**20
"""Text that may wait for its reader; beyond it the request is aborted."""
MOST_UNREAD_S = 60.0
"""How long output may wait for its reader."""
LOGPROB_BYTES = 32
"""What a token with its logprob, or an alternative, counts for beside its text."""


class Delta(msgspec.Struct):
    """New output of one request; pieces that came while nobody read are merged."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    """One per token id if the request asked for them, else empty."""


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
        self._logprobs: list[TokenLogprob] = []
        self._is_read = False
        self._unread_bytes = 0
        self._unread_since = 0.0
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt's tokens, if asked for; complete before the first output."""
        self.prompt_text: str | None = None
        """With `echo`, from `accepted` on: the prompt as the detokenizer reads it."""
        self.deadline: asyncio.TimerHandle | None = None
        self._first_scored = 0
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
        self._is_read = True
        while True:
            if self._ids or self._text:
                delta = Delta("".join(self._text), self._ids, self._logprobs)
                self._text, self._ids, self._logprobs = [], [], []
                self._unread_bytes = 0
                yield delta
            elif self._error is not None:
                raise self._error
            elif self.ended is not None:
                return
            else:
                await self._wait()

    def close(self) -> None:
        """Let go of the request; aborts it if it has not ended."""
        self._end_deadline()
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

    def on_accepted(self, num_prompt_tokens: int, prompt_text: str | None = None) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self.prompt_text = prompt_text
        self._wake()

    def on_prompt(self, first: int, logprobs: list[TokenLogprob]) -> None:
        """Logprobs of prompt tokens; what came twice (a resumed request) is dropped."""
        known = self.prompt_logprobs
        self._first_scored = min(self._first_scored, first) if known else first
        known.extend(logprobs[max(0, self._first_scored + len(known) - first) :])

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
        if delta.logprobs:
            self._logprobs.extend(delta.logprobs)
        self._wake()
        return None

    def unread_too_much(self, delta: TextDelta, now_s: float) -> bool:
        """Count a delta that has just come; True if the reader has left too much, or anything for too long.

        Only what comes while the reader is held up elsewhere counts, by its client: not what it is about to take.
        """
        if not self._is_read or self._waiter is not None:
            return False
        if self._unread_bytes == 0:
            self._unread_since = now_s
        self._unread_bytes += len(delta.text) + len(delta.token_ids)
        for token in delta.logprobs or ():
            self._unread_bytes += LOGPROB_BYTES * (1 + len(token.top))
        return self._unread_bytes > MOST_UNREAD_BYTES or now_s - self._unread_since > MOST_UNREAD_S

    def on_ended(self, ended: Ended) -> None:
        self._end_deadline()
        if ended.num_tokens != self._num_tokens and ended.num_prompt_tokens:
            log.error("event=output_lost request=%d have=%d of=%d", self.request, self._num_tokens, ended.num_tokens)
            self._error = InternalError("A part of this request's output was lost.")
        self.ended = ended
        self._wake()

    def _end_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None

    def on_error(self, error: EngineError) -> None:
        self._end_deadline()
        self._error = error
        self._wake()


def log_end(label: str, ended: Ended) -> None:
    """One line per finished request, times from its stamps in milliseconds; never its text."""
    stamps = ended.stamps

    def ms(since: int, until: int) -> float:
        return (until - since) / 1e6 if since and until else 0.0

    log.info(
        "event=request id=%r finish=%s prompt_tokens=%d tokens=%d cached_tokens=%d "
        "tokenize_ms=%.1f queue_ms=%.1f ttft_ms=%.1f total_ms=%.1f",
        label,
        ended.finish.name.lower(),
        ended.num_prompt_tokens,
        ended.num_tokens,
        ended.cached_tokens,
        ms(stamps.arrived, stamps.tokenized),
        ms(stamps.queued, stamps.first_scheduled),
        ms(stamps.arrived, stamps.first_token),
        ms(stamps.arrived, stamps.sent),
    )
