"""POST /generate: one prompt or a batch, streamed and whole. docs/native.md describes the format."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from engine.errors import EngineError, InvalidRequestError
from engine.sampling import SamplingParams
from engine.server.body import decode_aside, read_body
from engine.server.keys import CLIENT, CLIENT_REQUEST_ID, KEEP_ALIVE_S, REQUEST_ID, UNKNOWN_FIELDS
from engine.server.native.answer import Answer
from engine.server.native.parse import GenerateCall, Part, parse_generate
from engine.server.native.sampling import client_words
from engine.server.openai.call import Limits
from engine.server.openai.choices import STARTED_AT_ONCE, together
from engine.server.openai.models import check_model
from engine.server.sse import DONE, EventStream, answer_with_events, event

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.generation import Generation

log = logging.getLogger("engine.server")


async def generate(request: web.Request) -> web.StreamResponse:
    """Errors before every part is accepted have their own status, in streams too; later ones come inside."""
    client = request.app[CLIENT]
    client.check_ready()
    body = await read_body(request, client.config.http.max_body_mb * 2**20)
    call = await decode_aside(_parser(request), body)
    check_model(call.model, client.model_name)
    if call.rid is not None and CLIENT_REQUEST_ID not in request:
        request[REQUEST_ID] = call.rid
    batch = _Batch(client, call)
    try:
        answers = await batch.accepted()
        if call.stream:
            return await _stream(request, batch, answers)
        return await _whole(batch, answers)
    finally:
        # Also when the client went away (CancelledError): whatever still runs for it ends here.
        batch.close()


def _parser(request: web.Request) -> Callable[[bytes], GenerateCall]:
    client = request.app[CLIENT]
    http = client.config.http
    assert client.model is not None  # ready
    return partial(
        parse_generate,
        unknown=request.app[UNKNOWN_FIELDS],
        limits=Limits(http.max_n, http.max_logprobs, client.model.config.vocab_size),
        max_prompt_bytes=http.max_body_mb * 2**20,
        request_id=request[REQUEST_ID],
    )


class _Batch:
    """The generations of one request."""

    def __init__(self, client: EngineClient, call: GenerateCall) -> None:
        self._client = client
        self._call = call
        self._begin_s = time.monotonic()
        self.several = call.several
        """The answer is a list."""
        self.generations: list[Generation] = []

    async def accepted(self) -> list[Answer]:
        """Start all parts and wait until each is accepted. Raises the first error, in the client's words."""
        parts = self._call.parts
        try:
            for idx, part in enumerate(parts):
                self.generations.append(self._start(part, part.sampling))
                if idx % STARTED_AT_ONCE == STARTED_AT_ONCE - 1:
                    await asyncio.sleep(0)
            return [await self._accept(idx, part) for idx, part in enumerate(parts)]
        except EngineError as error:
            raise client_words(error, self._call.source) from None

    def close(self) -> None:
        """Let go of every part; what has not ended is aborted."""
        for generation in self.generations:
            generation.close()

    def _start(self, part: Part, sampling: SamplingParams) -> Generation:
        return self._client.generate(
            part.input,
            sampling,
            stream=self._call.stream,
            label=part.label,
            cache_salt=self._call.cache_salt,
            priority=self._call.priority,
        )

    async def _accept(self, idx: int, part: Part) -> Answer:
        num_prompt_tokens = await self.generations[idx].accepted()
        start = part.sampling.prompt_logprobs_from
        if start > num_prompt_tokens:
            raise InvalidRequestError(
                f"logprob_start_len is {start}; the prompt has {num_prompt_tokens} tokens.", param="logprob_start_len"
            )
        return Answer(
            self.generations[idx],
            index=idx if self.several else None,
            num_prompt_tokens=num_prompt_tokens,
            top=part.sampling.logprobs,
            with_text=self._call.with_text,
            begin_s=self._begin_s,
        )


async def _whole(batch: _Batch, answers: list[Answer]) -> web.Response:
    await together([_read(generation, answer) for generation, answer in zip(batch.generations, answers, strict=True)])
    parts = [answer.json(final=True) for answer in answers]
    body = b"[" + b",".join(parts) + b"]" if batch.several else parts[0]
    return web.Response(body=body, content_type="application/json")


async def _read(generation: Generation, answer: Answer) -> None:
    async for delta in generation:
        answer.add(delta)


async def _stream(request: web.Request, batch: _Batch, answers: list[Answer]) -> web.StreamResponse:
    async def write(stream: EventStream) -> bytes:
        turn = asyncio.Lock()  # the stream takes one writer at a time
        pairs = zip(batch.generations, answers, strict=True)
        await together([_follow(generation, answer, stream, turn) for generation, answer in pairs])
        return DONE

    return await answer_with_events(request, request.app[KEEP_ALIVE_S], write, batch.close)


async def _follow(generation: Generation, answer: Answer, stream: EventStream, turn: asyncio.Lock) -> None:
    async for delta in generation:
        answer.add(delta)
        async with turn:
            await stream.send(event(answer.json(final=False)))
    async with turn:
        await stream.send(event(answer.json(final=True)))
