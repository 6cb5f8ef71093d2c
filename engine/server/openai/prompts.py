"""A completions body -> a Call. Pure and without asyncio, so that a thread can do it for large bodies."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.errors import InvalidRequestError
from engine.ipc.messages import TextInput, TokenInput, pack_i32
from engine.server.body import decode_json
from engine.server.openai.call import (
    Call,
    Input,
    Limits,
    build_call,
    check_logprobs,
    check_num_answers,
    max_tokens_of,
    sampling_of,
)
from engine.server.openai.fields import COMPLETION_FIELDS, UnknownFields, check_fields
from engine.server.openai.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_completion_decoder = msgspec.json.Decoder(CompletionRequest)


def parse_completion(body: bytes, unknown: UnknownFields, limits: Limits) -> Call:
    """Decode, and check everything but the sampling ranges (EngineClient does). Raises InvalidRequestError."""
    check_fields(decode_json(body, _fields_decoder), COMPLETION_FIELDS, unknown)
    request = decode_json(body, _completion_decoder)
    echo = bool(request.echo)
    logprobs = -1 if request.logprobs is None else check_logprobs("logprobs", request.logprobs, limits)
    sampling = sampling_of(
        request,
        max_tokens=max_tokens_of(request, least=0, default=DEFAULT_MAX_TOKENS),
        logprobs=logprobs,
        prompt_logprobs_from=0 if echo and logprobs >= 0 else -1,
    )
    call = build_call(request, _prompts(request, limits), sampling, limits, echo=echo)
    _check_best_of(request.best_of, call.n)
    return call


def _check_best_of(best_of: int | None, n: int) -> None:
    if best_of is None or best_of == n:
        return
    if best_of < n:
        raise InvalidRequestError(f"best_of is {best_of}, less than n, which is {n}.", param="best_of")
    raise InvalidRequestError(
        f"best_of is {best_of} and n is {n}; choosing the best of more answers than are returned is not supported: "
        "ask for n answers and choose among them.",
        param="best_of",
        code="unsupported_parameter",
    )


def _prompts(request: CompletionRequest, limits: Limits) -> list[Input]:
    """One input a prompt: a text, texts, ids or lists of ids."""
    prompt = request.prompt
    if prompt is None:
        raise InvalidRequestError("prompt is missing.", param="prompt")
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if isinstance(item, int)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(prompt) not in (len(texts), len(ids), len(lists)):
        raise InvalidRequestError(
            "prompt mixes kinds; it must be a string, a list of strings, a list of token ids or a list of such lists.",
            param="prompt",
        )
    check_num_answers(len(texts) or len(lists) or 1, request.n or 1)
    if texts:
        return [_text(text, f"prompt[{idx}]") for idx, text in enumerate(texts)]
    if lists:
        return [_tokens(one, f"prompt[{idx}]", limits) for idx, one in enumerate(lists)]
    return [_tokens(ids, "prompt", limits)]


def _text(text: str, where: str) -> TextInput:
    if not text:
        raise InvalidRequestError(f"{where} is empty; at least one character is needed.", param=where)
    return TextInput(text)


def _tokens(ids: list[int], where: str, limits: Limits) -> TokenInput:
    if not ids:
        raise InvalidRequestError(f"{where} is empty; at least one token is needed.", param=where)
    array = np.asarray(ids, "<i4")
    wrong = (array < 0) | (array >= limits.vocab_size)
    if wrong.any():
        raise InvalidRequestError(
            f"{where} holds token {ids[int(wrong.argmax())]}; ids run from 0 to {limits.vocab_size - 1}.", param=where
        )
    return TokenInput(pack_i32(array))
