"""A chat body -> what the engine needs of it. Pure and without asyncio, so that a thread can do it for large bodies."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput
from engine.sampling import SamplingParams
from engine.server.body import decode_json
from engine.server.keys import SANE_ID
from engine.server.openai.fields import UnknownFields, check_fields
from engine.server.openai.messages import template_messages
from engine.server.openai.protocol import ChatRequest

RESERVED_TEMPLATE_KWARGS = ("chat_template", "messages", "tokenize", "tools")

T = TypeVar("T")

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_chat_decoder = msgspec.json.Decoder(ChatRequest)


class ChatCall(msgspec.Struct, frozen=True):
    """One checked chat request."""

    model: str | None
    input: ChatInput
    sampling: SamplingParams
    limit_name: str
    """The name under which the client gave max_tokens."""
    stream: bool
    include_usage: bool
    continuous_usage: bool
    label: str | None
    cache_salt: str | None
    priority: int


def parse_chat(body: bytes, unknown: UnknownFields) -> ChatCall:
    """Decode, and check everything but the sampling ranges (EngineClient does). Raises InvalidRequestError."""
    fields = decode_json(body, _fields_decoder)
    check_fields(fields, unknown)
    request = decode_json(body, _chat_decoder)
    if request.rid is not None and not SANE_ID.fullmatch(request.rid):
        raise InvalidRequestError("rid must be 1 to 128 printable ASCII characters.", param="rid")
    options = request.stream_options
    return ChatCall(
        model=request.model,
        input=_chat_input(request, fields),
        sampling=_sampling(request),
        limit_name="max_tokens" if request.max_completion_tokens is None else "max_completion_tokens",
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        label=request.rid,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
    )


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


def _sampling(request: ChatRequest) -> SamplingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    default = SamplingParams()
    return SamplingParams(
        temperature=_or(request.temperature, default.temperature),
        top_p=_or(request.top_p, default.top_p),
        # 0 is how several clients say off.
        top_k=_or(request.top_k, default.top_k) or default.top_k,
        min_p=_or(request.min_p, default.min_p),
        max_tokens=request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=_or(request.ignore_eos, default.ignore_eos),
        skip_special_tokens=_or(request.skip_special_tokens, default.skip_special_tokens),
        seed=request.seed,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
