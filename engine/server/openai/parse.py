"""A chat body -> a Call. Pure and without asyncio, so that a thread can do it for large bodies."""

from __future__ import annotations

import msgspec

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput
from engine.server.body import decode_json
from engine.server.openai.call import Call, Limits, build_call, check_logprobs, max_tokens_of, sampling_of
from engine.server.openai.fields import CHAT_FIELDS, UnknownFields, check_fields
from engine.server.openai.messages import template_messages
from engine.server.openai.protocol import ChatRequest

RESERVED_TEMPLATE_KWARGS = ("chat_template", "messages", "tokenize", "tools")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chat_decoder = msgspec.json.Decoder(ChatRequest)


def parse_chat(body: bytes, unknown: UnknownFields, limits: Limits) -> Call:
    """Decode, and check everything but the sampling ranges (EngineClient does). Raises InvalidRequestError."""
    fields = decode_json(body, _fields_decoder)
    check_fields(fields, CHAT_FIELDS, unknown)
    request = decode_json(body, _chat_decoder)
    sampling = sampling_of(
        request,
        max_tokens=max_tokens_of(request, least=1, default=None),
        logprobs=_logprobs(request, limits),
    )
    return build_call(request, [_chat_input(request, fields)], sampling, limits)


def _logprobs(request: ChatRequest, limits: Limits) -> int:
    wanted = check_logprobs("top_logprobs", request.top_logprobs or 0, limits)
    if request.logprobs:
        return wanted
    if wanted:
        raise InvalidRequestError(f"top_logprobs is {wanted}; it needs logprobs to be true.", param="top_logprobs")
    return -1


def _chat_input(request: ChatRequest, fields: dict[str, msgspec.Raw]) -> ChatInput:
    for name in RESERVED_TEMPLATE_KWARGS:
        if name in (request.chat_template_kwargs or ()):
            raise InvalidRequestError(
                f"chat_template_kwargs must not set {name}.", param=f"chat_template_kwargs.{name}"
            )
    try:
        messages_json = msgspec.json.encode(template_messages(request.messages))
    except RecursionError:
        raise InvalidRequestError("messages are nested too deeply.", param="messages") from None
    if not request.chat_template_kwargs:
        return ChatInput(messages_json)
    # The client's own bytes, which the typed decoding has just checked.
    return ChatInput(messages_json, bytes(fields["chat_template_kwargs"]))
