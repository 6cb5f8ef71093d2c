"""POST /v1/chat/completions, streamed and whole."""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from engine.errors import EngineError, InternalError, InvalidRequestError
from engine.ipc.messages import Ended, Finish
from engine.server.body import decode_aside, read_body
from engine.server.error_body import error_body
from engine.server.keys import CLIENT, CLIENT_REQUEST_ID, KEEP_ALIVE_S, REQUEST_ID, UNKNOWN_FIELDS
from engine.server.openai.chunks import ChunkEncoder
from engine.server.openai.models import check_model
from engine.server.openai.parse import ChatCall, parse_chat
from engine.server.openai.protocol import AnswerMessage, ChatCompletion, Choice, FinishReason, Usage, usage_of
from engine.server.sse import DONE, EventStream, event

if TYPE_CHECKING:
    from engine.client import EngineClient
    from engine.generation import Generation

log = logging.getLogger("engine.server")

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
}


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Errors before the request is accepted have their own status; later ones come inside the stream."""
    client = request.app[CLIENT]
    client.check_ready()
    body = await read_body(request, client.config.http.max_body_mb * 2**20)
    unknown = request.app[UNKNOWN_FIELDS]
    call = await decode_aside(lambda data: parse_chat(data, unknown), body)
    check_model(call.model, client.model_name)
    if call.label is not None and CLIENT_REQUEST_ID not in request:
        request[REQUEST_ID] = call.label
    generation = _start(client, call, call.label or request[REQUEST_ID])
    try:
        num_prompt_tokens = await generation.accepted()
        if call.stream:
            return await _stream(request, call, generation, client.model_name, num_prompt_tokens)
        return await _whole(generation, client.model_name)
    finally:
        # Also when the client went away (CancelledError): whatever still runs for it ends here.
        generation.close()


def _start(client: EngineClient, call: ChatCall, label: str) -> Generation:
    try:
        return client.generate(
            call.input,
            call.sampling,
            stream=call.stream,
            label=label,
            cache_salt=call.cache_salt,
            priority=call.priority,
        )
    except InvalidRequestError as error:
        if error.param != "max_tokens":
            raise
        message = error.message.replace("max_tokens", call.limit_name, 1)
        raise InvalidRequestError(message, param=call.limit_name) from None


async def _whole(generation: Generation, model: str) -> web.Response:
    text = "".join([delta.text async for delta in generation])
    ended = _ended(generation)
    choice = Choice(AnswerMessage(text), _reason(ended), ended.stop_reason, ended.stop_reason)
    answer = ChatCompletion(_answer_id(), int(time.time()), model, [choice], _final_usage(ended))
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")


async def _stream(
    request: web.Request, call: ChatCall, generation: Generation, model: str, num_prompt_tokens: int
) -> web.StreamResponse:
    chunks = ChunkEncoder(_answer_id(), int(time.time()), model, with_null_usage=call.include_usage)
    stream = EventStream(request, request.app[KEEP_ALIVE_S])
    try:
        async with stream:
            try:
                await _send_text(stream, chunks, call, generation, num_prompt_tokens)
                last = _last_events(chunks, call, _ended(generation))
            except EngineError as error:
                last = event(error_body(error.info())) + DONE
            except ConnectionError:
                raise
            except Exception:
                log.exception("event=stream_failed request=%s", request[REQUEST_ID])
                text = f"Internal error; the server's log has it under request id {request[REQUEST_ID]}."
                last = event(error_body(InternalError(text).info())) + DONE
            await stream.finish(last)
    except ConnectionError:
        log.debug("event=client_gone request=%s", request[REQUEST_ID])
    return stream.response


async def _send_text(
    stream: EventStream, chunks: ChunkEncoder, call: ChatCall, generation: Generation, num_prompt_tokens: int
) -> None:
    num_tokens = 0
    await stream.send(chunks.role(usage_of(num_prompt_tokens, 0) if call.continuous_usage else None))
    async for delta in generation:
        num_tokens += len(delta.token_ids)
        if delta.text:
            usage = usage_of(num_prompt_tokens, num_tokens) if call.continuous_usage else None
            await stream.send(chunks.text(delta.text, usage))


def _last_events(chunks: ChunkEncoder, call: ChatCall, ended: Ended) -> bytes:
    usage = _final_usage(ended)
    events = chunks.finish(_reason(ended), ended.stop_reason, usage if call.continuous_usage else None)
    if call.include_usage:
        events += chunks.usage(usage)
    return events + DONE


def _ended(generation: Generation) -> Ended:
    if generation.ended is None:
        raise InternalError("The request ended without its final facts.")
    return generation.ended


def _reason(ended: Ended) -> FinishReason:
    return _REASONS.get(ended.finish, "abort")


def _final_usage(ended: Ended) -> Usage:
    return usage_of(ended.num_prompt_tokens, ended.num_tokens, ended.cached_tokens)


def _answer_id() -> str:
    return f"chatcmpl-{secrets.token_hex(16)}"
