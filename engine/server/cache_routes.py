"""The prefix cache for operators: POST /flush_cache, /pin_prefix, /unpin_prefix."""

from __future__ import annotations

from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput, TextInput, TokenInput, pack_i32
from engine.server.body import decode_aside, decode_json, read_body
from engine.server.keys import CLIENT
from engine.server.openai.messages import template_messages
from engine.server.openai.protocol import Message

DEFAULT_TTL_S = 3600.0
MAX_TTL_S = 7 * 24 * 3600.0
MAX_SALT = 256
"""Longest cache_salt, in characters."""


class PinRequest(msgspec.Struct, frozen=True):
    """Body of /pin_prefix; exactly one of text, input_ids and messages."""

    text: str | None = None
    input_ids: list[Annotated[int, Meta(ge=0, le=2**31 - 1)]] | None = None
    messages: list[Message] | None = None
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] = DEFAULT_TTL_S
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT)] | None = None


class UnpinRequest(msgspec.Struct, frozen=True):
    """Body of /unpin_prefix."""

    pin_id: Annotated[int, Meta(ge=0, le=2**63 - 1)]


_pin_decoder = msgspec.json.Decoder(PinRequest)
_unpin_decoder = msgspec.json.Decoder(UnpinRequest)


async def flush_cache(request: web.Request) -> web.Response:
    """Drop every cached prefix that no running request uses."""
    pages = await request.app[CLIENT].flush_cache()
    return web.json_response({"success": True, "pages": pages})


async def pin_prefix(request: web.Request) -> web.Response:
    """Keep what is cached of a prefix for ttl_s seconds; 400 if nothing of it is cached or pins hold too much."""
    client = request.app[CLIENT]
    client.check_ready()
    body = await read_body(request, client.config.http.max_body_mb * 2**20)
    source, call = await decode_aside(_parse_pin, body)
    pin_id, num_tokens = await client.pin_prefix(source, call.ttl_s, call.cache_salt)
    return web.json_response({"pin_id": pin_id, "tokens": num_tokens, "ttl_s": call.ttl_s})


async def unpin_prefix(request: web.Request) -> web.Response:
    """Let a pinned prefix go."""
    client = request.app[CLIENT]
    client.check_ready()
    body = await read_body(request, client.config.http.max_body_mb * 2**20)
    call = decode_json(body, _unpin_decoder)
    if not await client.unpin_prefix(call.pin_id):
        raise InvalidRequestError(f"There is no pin {call.pin_id}; it may have run out.", param="pin_id")
    return web.json_response({"success": True})


def _parse_pin(body: bytes) -> tuple[ChatInput | TextInput | TokenInput, PinRequest]:
    call = decode_json(body, _pin_decoder)
    given = [name for name in ("text", "input_ids", "messages") if getattr(call, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"Exactly one of text, input_ids and messages is needed; this has {', '.join(given) or 'none'}."
        )
    if call.text is not None:
        return TextInput(call.text), call
    if call.input_ids is not None:
        return TokenInput(pack_i32(call.input_ids)), call
    # A prefix ends where the next message would begin.
    return ChatInput(msgspec.json.encode(template_messages(call.messages)), b'{"add_generation_prompt":false}'), call
