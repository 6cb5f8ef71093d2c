"""The OpenAI wire, requests: the fields this version takes. null means absent everywhere."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

# Bounds of the integers our messages can carry; the real ranges are SamplingParams'.
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class Part(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    """A call an earlier answer made."""

    name: str
    arguments: str | dict[str, object] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    """Envelope of a call."""

    function: ToolFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream reports beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Speculative(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far the server may draft this answer's tokens ahead."""

    enabled: bool | None = None
    num_draft_tokens: Int32 | None = None
    """At most so many at a time."""


class CommonRequest(msgspec.Struct, frozen=True):
    """What both routes take."""

    model: str | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    rid: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    speculative: Speculative | None = None


class ChatRequest(CommonRequest, frozen=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None


class CompletionRequest(CommonRequest, frozen=True):
    """Body of POST /v1/completions."""

    prompt: str | list[str | Int32 | list[Int32]] | None = None
    logprobs: Int32 | None = None
    echo: bool | None = None
    best_of: Int32 | None = None
