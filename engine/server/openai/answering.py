"""From a POST to its answer, streamed or whole; the routes differ in their parser and in how an answer looks."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from engine.errors import EngineError, PayloadTooLargeError, RemoteError
from engine.ipc.messages import TokenLogprob
from engine.server.body import decode_aside, read_body
from engine.server.keys import CLIENT, CLIENT_REQUEST_ID, KEEP_ALIVE_S, REQUEST_ID, UNKNOWN_FIELDS
from engine.server.openai.answers import FinishReason, Usage, finish_reason
from engine.server.openai.call import Call, Limits
from engine.server.openai.choices import Choices, together
from engine.server.openai.chunks import ChunkEncoder, ChunkFormat
from engine.server.openai.fields import UnknownFields
from engine.server.openai.logprobs import ChatLogprobs, LogprobWriter, TextLogprobs
from engine.server.openai.models import check_model
from engine.server.openai.streaming import StreamedAnswer
from engine.server.openai.transcript import Transcript
from engine.server.sse import answer_with_events

log = logging.getLogger("engine.server")

_MAX_TOKENS = re.compile(r"\bmax_tokens\b")


class Told(msgspec.Struct):
    """One choice, whole."""

    index: int
    text: str
    logprobs: ChatLogprobs | TextLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class Route(msgspec.Struct, frozen=True):
    """What one route has of its own."""

    parse: Callable[[bytes, UnknownFields, Limits], Call]
    prompt_field: str
    id_prefix: str
    chunk: ChunkFormat
    writer: type[LogprobWriter]
    whole: Callable[[str, int, str, list[Told], Usage], msgspec.Struct]
    """id, created, model, choices, usage -> the response object."""


async def answer(request: web.Request, route: Route) -> web.StreamResponse:
    """Errors before all choices are accepted have their own status; later ones come inside the stream."""
    client = request.app[CLIENT]
    client.check_ready()
    options = client.config.http
    body = await read_body(request, options.max_body_mb * 2**20)
    unknown = request.app[UNKNOWN_FIELDS]
    assert client.model is not None
    limits = Limits(options.max_n, options.max_logprobs, client.model.config.vocab_size)
    call = await decode_aside(lambda data: route.parse(data, unknown, limits), body)
    check_model(call.model, client.model_name)
    if len(body) * call.n > options.max_body_mb * 2**20:
        raise PayloadTooLargeError(
            f"The body of {len(body)} bytes, {call.n} times over (n), exceeds the limit of {options.max_body_mb} MiB "
            "(--max-body-mb).",
            param="n",
        )
    if call.label is not None and CLIENT_REQUEST_ID not in request:
        request[REQUEST_ID] = call.label
    choices = Choices(call)
    try:
        try:
            await choices.start(client, call.label or request[REQUEST_ID])
        except EngineError as error:
            raise _in_the_clients_words(error, call, route) from None
        answer_id = f"{route.id_prefix}{secrets.token_hex(16)}"
        if call.stream:
            chunks = ChunkEncoder(
                answer_id, int(time.time()), client.model_name, route.chunk, with_null_usage=call.include_usage
            )
            transcripts = choices.transcripts(route.writer)
            return await answer_with_events(
                request,
                request.app[KEEP_ALIVE_S],
                lambda stream: StreamedAnswer(stream, call, choices, chunks).run(transcripts),
                choices.close,
            )
        told = await together(
            [_tell(index, transcript) for index, transcript in enumerate(choices.transcripts(route.writer))]
        )
        whole = route.whole(answer_id, int(time.time()), client.model_name, told, choices.usage())
        return web.Response(body=msgspec.json.encode(whole), content_type="application/json")
    finally:
        # Also when the client went away (CancelledError): whatever still runs for it ends here.
        choices.close()


def _in_the_clients_words(error: EngineError, call: Call, route: Route) -> EngineError:
    """The error with the names of fields that the client used."""
    info = error.info()
    message = _MAX_TOKENS.sub(call.limit_name, info.message)
    param = {"max_tokens": call.limit_name, "messages": route.prompt_field}.get(info.param or "", info.param)
    if (message, param) == (info.message, info.param):
        return error
    return RemoteError(msgspec.structs.replace(info, message=message, param=param))


async def _tell(index: int, transcript: Transcript) -> Told:
    texts: list[str] = []
    entries: list[TokenLogprob] = []
    async for delta in transcript.generation:
        text, more = transcript.take(delta)
        texts.append(text)
        entries += more
    text, more = transcript.rest()
    texts.append(text)
    entries += more
    ended = transcript.ended
    return Told(index, "".join(texts), transcript.render(entries), finish_reason(ended), ended.stop_reason)
