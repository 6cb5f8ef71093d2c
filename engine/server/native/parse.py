"""A /generate body -> the generations it asks for. Pure and without asyncio, so that a thread can do it."""

from __future__ import annotations

from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError, PayloadTooLargeError
from engine.ipc.messages import TextInput, TokenInput, pack_i32
from engine.sampling import SamplingParams
from engine.server.body import decode_json
from engine.server.keys import SANE_ID
from engine.server.native.fields import IGNORED, REFUSED
from engine.server.native.sampling import Sampled, parse_sampling
from engine.server.openai.call import MAX_ANSWERS, Limits, check_logprobs
from engine.server.openai.fields import FieldRules, UnknownFields, check_fields
from engine.server.openai.protocol import Int32

Token: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
T = TypeVar("T")


class GenerateBody(msgspec.Struct, frozen=True):
    """Body of /generate; null means absent. What may be a list has one entry per prompt of a batch."""

    text: str | list[str] | None = None
    input_ids: list[Token | list[Token]] | None = None
    sampling_params: dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Int32 | list[Int32] | None = None
    top_logprobs_num: bool | Int32 | list[Int32] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | None = None
    model: str | None = None


class Part(msgspec.Struct, frozen=True):
    """One generation."""

    input: TextInput | TokenInput
    sampling: SamplingParams
    label: str


class GenerateCall(msgspec.Struct, frozen=True):
    """One checked request; parts are prompt-major."""

    parts: list[Part]
    source: str
    """text or input_ids."""
    several: bool
    """The answer is a list."""
    stream: bool
    rid: str | None
    """The client's own, if it is one string."""
    with_text: bool
    cache_salt: str | None
    priority: int
    model: str | None


_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RULES = FieldRules(frozenset(GenerateBody.__struct_fields__) | IGNORED, REFUSED)
_body_decoder = msgspec.json.Decoder(GenerateBody)


def parse_generate(
    data: bytes, unknown: UnknownFields, limits: Limits, *, max_prompt_bytes: int, request_id: str
) -> GenerateCall:
    """Decode, and check everything but the sampling ranges (EngineClient does).

    `max_prompt_bytes` bounds all prompts together, each counted n times, 4 bytes a token id; `request_id` labels what
    has no rid. Raises InvalidRequestError, PayloadTooLargeError.
    """
    check_fields(decode_json(data, _fields_decoder), _RULES, unknown)
    body = decode_json(data, _body_decoder)
    source, prompts = _prompts(body)
    is_batch = prompts is not None
    inputs = prompts if prompts is not None else [_single(body)]
    num = len(inputs)
    if not 1 <= num <= MAX_ANSWERS:
        raise InvalidRequestError(f"{source} holds {num} prompts; it must hold 1 to {MAX_ANSWERS}.", param=source)
    sampled = _sampling(body, num if is_batch else None, limits, unknown)
    num_parts = sum(params.n for params in sampled)
    if num_parts > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{num} prompts with their n ask for {num_parts} answers; at most {MAX_ANSWERS} are allowed.",
            param="sampling_params.n",
        )
    size = sum(_size(prompt) * params.n for prompt, params in zip(inputs, sampled, strict=True))
    if size > max_prompt_bytes:
        raise PayloadTooLargeError(
            f"The prompts of all {num_parts} answers together exceed {max_prompt_bytes} bytes (--max-body-mb).",
            param=source,
        )
    labels = _labels(body.rid, num if is_batch else None, request_id)
    parts = [
        Part(prompt, params.sampling.of_choice(choice), label)
        for prompt, params, label in zip(inputs, sampled, labels, strict=True)
        for choice in range(params.n)
    ]
    return GenerateCall(
        parts=parts,
        source=source,
        several=is_batch or num_parts > 1,
        stream=bool(body.stream),
        rid=body.rid if isinstance(body.rid, str) else None,
        with_text=bool(body.return_text_in_logprobs),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        model=body.model,
    )


def _prompts(body: GenerateBody) -> tuple[str, list[TextInput | TokenInput] | None]:
    """The field that holds the prompt, and the prompts of a batch; None if it is not one."""
    given = [name for name in ("text", "input_ids") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"Exactly one of text and input_ids is needed; this has {' and '.join(given) or 'none'}."
        )
    if isinstance(body.text, list):
        return "text", [TextInput(text) for text in body.text]
    ids = body.input_ids or []
    lists = [item for item in ids if isinstance(item, list)]
    if lists and len(lists) != len(ids):
        raise InvalidRequestError("input_ids mixes ids and lists; it must be one or the other.", param="input_ids")
    if lists:
        return "input_ids", [TokenInput(pack_i32(item)) for item in lists]
    return given[0], None


def _single(body: GenerateBody) -> TextInput | TokenInput:
    return TextInput(body.text) if isinstance(body.text, str) else TokenInput(pack_i32(body.input_ids or []))


def _size(prompt: TextInput | TokenInput) -> int:
    return len(prompt.text) if isinstance(prompt, TextInput) else len(prompt.ids)


def _sampling(body: GenerateBody, num: int | None, limits: Limits, unknown: UnknownFields) -> list[Sampled]:
    """One per prompt; `num` is None for a single one. What all share is parsed once."""
    params = body.sampling_params
    if isinstance(params, list):
        _check_length("sampling_params", len(params), num)
        sampled = [parse_sampling(item, f"sampling_params[{idx}].", limits, unknown) for idx, item in enumerate(params)]
    else:
        sampled = [parse_sampling(params or {}, "sampling_params.", limits, unknown)] * (num or 1)
    wanted: list[bool] = _each("return_logprob", body.return_logprob, False, num)
    starts: list[int] = _each("logprob_start_len", body.logprob_start_len, -1, num)
    tops: list[int] = _each("top_logprobs_num", body.top_logprobs_num, 0, num)
    for top in tops:
        check_logprobs("top_logprobs_num", int(top), limits)
    for start in starts:
        if start < -1:
            raise InvalidRequestError(
                f"logprob_start_len is {start}; it must be -1 (no prompt tokens) or the index of a prompt token.",
                param="logprob_start_len",
            )
    return [
        _with_logprobs(item, int(top), start) if want else item
        for item, want, start, top in zip(sampled, wanted, starts, tops, strict=True)
    ]


def _with_logprobs(sampled: Sampled, top: int, start: int) -> Sampled:
    sampling = msgspec.structs.replace(sampled.sampling, logprobs=top, prompt_logprobs_from=start)
    return msgspec.structs.replace(sampled, sampling=sampling)


def _each(name: str, value: T | list[T] | None, default: T, num: int | None) -> list[T]:
    """`value` for each prompt."""
    if isinstance(value, list):
        _check_length(name, len(value), num)
        return value
    return [default if value is None else value] * (num or 1)


def _check_length(name: str, length: int, num: int | None) -> None:
    if num is None:
        raise InvalidRequestError(f"{name} is a list; there is one prompt, which is none.", param=name)
    if length != num:
        raise InvalidRequestError(f"{name} has {length} entries; there are {num} prompts.", param=name)


def _labels(rid: str | list[str] | None, num: int | None, request_id: str) -> list[str]:
    """What each prompt's generations are called; a string stands for rid_0, rid_1, ... in a batch."""
    if isinstance(rid, list):
        _check_length("rid", len(rid), num)
        if len(set(rid)) != len(rid):
            raise InvalidRequestError("rid holds the same id twice.", param="rid")
    for given in rid if isinstance(rid, list) else [] if rid is None else [rid]:
        if not SANE_ID.fullmatch(given):
            raise InvalidRequestError("rid must be 1 to 128 printable ASCII characters.", param="rid")
    if isinstance(rid, list):
        return rid
    base = request_id if rid is None else rid
    return [base] if num is None else [f"{base}_{idx}" for idx in range(num)]
