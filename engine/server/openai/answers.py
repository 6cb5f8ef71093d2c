"""The OpenAI wire, answers: response objects of both routes."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.ipc.messages import Ended, Finish
from engine.server.openai.logprobs import ChatLogprobs, TextLogprobs

FinishReason: TypeAlias = Literal["stop", "length", "abort"]

_REASONS: dict[Finish, FinishReason] = {
    Finish.STOP_TOKEN: "stop",
    Finish.STOP_STRING: "stop",
    Finish.LENGTH: "length",
    Finish.ABORT: "abort",
}


def finish_reason(ended: Ended) -> FinishReason:
    """OpenAI's word for why a request ended."""
    return _REASONS.get(ended.finish, "abort")


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens whose keys and values were already in the cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Drafted tokens that are in the answer, and those that were verified and are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, omit_defaults=True):
    """Token counts; prompt + completion = total."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


def usage_of(
    num_prompt_tokens: int,
    num_tokens: int,
    prompt: PromptTokensDetails | None = None,
    completion: CompletionTokensDetails | None = None,
) -> Usage:
    """Counts that add up; without details while these are not known yet."""
    return Usage(num_prompt_tokens, num_tokens, num_prompt_tokens + num_tokens, prompt, completion)


class AnswerMessage(msgspec.Struct):
    """The whole answer."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """`matched_stop` (SGLang's name) and `stop_reason` (vLLM's) say which stop string or token ended the text."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    matched_stop: str | int | None
    stop_reason: str | int | None


class ChatCompletion(msgspec.Struct):
    """Response of an unstreamed chat."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: None = None


class TextChoice(msgspec.Struct):
    """One completion; with echo the prompt is the beginning of its text."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason
    matched_stop: str | int | None
    stop_reason: str | int | None


class TextCompletion(msgspec.Struct):
    """Response of unstreamed completions."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: None = None
