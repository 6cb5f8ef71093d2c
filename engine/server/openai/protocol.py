"""The OpenAI wire: request fields this version takes, and response objects. null in a request means absent."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

# Bounds of the integers our messages can carry; the real ranges are SamplingParams'.
Int32: TypeAlias = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


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


class ChatRequest(msgspec.Struct, frozen=True):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] | None = None
    model: str | None = None
    max_tokens: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    seed: Int64 | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, object] | None = None
    rid: str | None = None
    user: str | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens whose keys and values were already in the cache."""

    cached_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts; prompt + completion = total."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class AnswerMessage(msgspec.Struct):
    """The whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct):
    """`matched_stop` (SGLang's name) and `stop_reason` (vLLM's) say which stop string or token ended the text."""

    message: AnswerMessage
    finish_reason: FinishReason
    matched_stop: str | int | None
    stop_reason: str | int | None
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    """Response of an unstreamed chat."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None


def usage_of(num_prompt_tokens: int, num_tokens: int, cached_tokens: int | None = None) -> Usage:
    """Counts that add up; without details while the cached share is not known yet."""
    details = None if cached_tokens is None else PromptTokensDetails(cached_tokens)
    return Usage(num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens, details)
