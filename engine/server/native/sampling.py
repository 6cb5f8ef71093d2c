"""sampling_params of /generate, by SGLang's names, as our SamplingParams."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from engine.errors import EngineError, InvalidRequestError, RemoteError
from engine.sampling import SamplingParams
from engine.server.body import decode_json
from engine.server.native.fields import IGNORED_SAMPLING, REFUSED_SAMPLING, unknown_name
from engine.server.openai.call import Limits, sampling_of
from engine.server.openai.fields import FieldRules, UnknownFields, check_fields
from engine.server.openai.protocol import CommonRequest, Int32, Int64, Speculative

DEFAULT_MAX_NEW_TOKENS = 128


class SamplingBody(msgspec.Struct, frozen=True):
    """The wire's names; null means absent, except that max_new_tokens null means as many as fit."""

    max_new_tokens: Int32 | UnsetType | None = UNSET
    min_new_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    n: Int32 | None = None
    logit_bias: dict[str, float] | None = None
    sampling_seed: Int64 | None = None
    seed: Int64 | None = None
    speculative: Speculative | None = None


class Sampled(msgspec.Struct, frozen=True):
    """One checked sampling_params object, but for the ranges that SamplingParams checks."""

    sampling: SamplingParams
    n: int


_NAMES = SamplingBody.__struct_fields__
_RULES = FieldRules(frozenset(_NAMES) | IGNORED_SAMPLING, REFUSED_SAMPLING)
_decoder = msgspec.json.Decoder(SamplingBody)

# The engine's words for what the client named otherwise.
_RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


def parse_sampling(fields: dict[str, msgspec.Raw], prefix: str, limits: Limits, unknown: UnknownFields) -> Sampled:
    """`prefix` (`sampling_params.`) stands before names in errors. An unknown name is an InvalidRequestError, too."""
    try:
        for name in fields:
            if name not in _RULES.known and name not in _RULES.refused:
                raise unknown_name(name, _NAMES)
        check_fields(fields, _RULES, unknown)
        body = decode_json(msgspec.json.encode(fields), _decoder)
        return _sampled(body, limits)
    except InvalidRequestError as error:
        param = f"{prefix}{error.param}" if error.param else prefix.removesuffix(".")
        raise InvalidRequestError(f"{prefix}{error.message}", param=param, code=error.code) from None


def client_words(error: EngineError, source: str) -> EngineError:
    """An error of the engine in the names of this route; `source` is text or input_ids."""
    info = error.info()
    if info.param in ("prompt", "messages"):
        param, message = source, info.message
    elif info.param in SamplingParams.__struct_fields__:
        name = _RENAMED.get(info.param, info.param)
        param, message = f"sampling_params.{name}", info.message
        if name != info.param:
            message = message.replace(info.param, name)
    else:
        return error
    return RemoteError(msgspec.structs.replace(info, message=message, param=param))


def _sampled(body: SamplingBody, limits: Limits) -> Sampled:
    if body.sampling_seed is not None and body.seed not in (None, body.sampling_seed):
        raise InvalidRequestError("seed and sampling_seed are two names of one value and differ.", param="seed")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.max_n:
        raise InvalidRequestError(f"n is {n}; it must lie in 1..{limits.max_n} (--max-n).", param="n")
    common = CommonRequest(
        min_tokens=body.min_new_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias,
        seed=body.seed if body.sampling_seed is None else body.sampling_seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids,
        no_stop_trim=body.no_stop_trim,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        speculative=body.speculative,
    )
    wanted = body.max_new_tokens
    if wanted is UNSET:
        wanted = max(DEFAULT_MAX_NEW_TOKENS, body.min_new_tokens or 0)
    sampling = sampling_of(common, max_tokens=wanted, logprobs=-1)
    # What the client did not ask for yields where less fits.
    return Sampled(msgspec.structs.replace(sampling, may_shorten=body.max_new_tokens is UNSET), n)
