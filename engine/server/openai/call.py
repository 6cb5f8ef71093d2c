"""Call: one checked request of either route, as the engine needs it."""

from __future__ import annotations

import re
from typing import TypeAlias, TypeVar

import msgspec

from engine.errors import InvalidRequestError
from engine.ipc.messages import ChatInput, TextInput, TokenInput
from engine.sampling import MAX_DRAFTS, MAX_INT32, MAX_LOGIT_BIAS, SamplingParams
from engine.server.error_body import shorten
from engine.server.keys import SANE_ID
from engine.server.openai.protocol import CommonRequest, Speculative

MAX_ANSWERS = 4096
"""Most answers (prompts times n) of one request."""

Input: TypeAlias = ChatInput | TextInput | TokenInput
T = TypeVar("T")

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


class Limits(msgspec.Struct, frozen=True):
    """What this server allows a request to ask for."""

    max_n: int
    max_logprobs: int
    vocab_size: int


class Call(msgspec.Struct, frozen=True):
    """One checked request: `n` answers to each of `inputs`."""

    model: str | None
    inputs: list[Input]
    n: int
    sampling: SamplingParams
    limit_name: str
    """The name under which the client gave max_tokens."""
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    label: str | None
    cache_salt: str | None
    priority: int

    @property
    def num_answers(self) -> int:
        return len(self.inputs) * self.n


def build_call(
    request: CommonRequest, inputs: list[Input], sampling: SamplingParams, limits: Limits, *, echo: bool = False
) -> Call:
    """Check what both routes share, but for the sampling ranges (EngineClient does). Raises InvalidRequestError."""
    if request.rid is not None and not SANE_ID.fullmatch(request.rid):
        raise InvalidRequestError("rid must be 1 to 128 printable ASCII characters.", param="rid")
    n = _or(request.n, 1)
    if not 1 <= n <= limits.max_n:
        raise InvalidRequestError(f"n is {n}; it must lie in 1..{limits.max_n} (--max-n).", param="n")
    options = request.stream_options
    return Call(
        model=request.model,
        inputs=inputs,
        n=n,
        sampling=sampling,
        limit_name=limit_name(request),
        echo=echo,
        stream=bool(request.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        label=request.rid,
        cache_salt=request.cache_salt,
        priority=request.priority or 0,
    )


def sampling_of(
    request: CommonRequest, *, max_tokens: int | None, logprobs: int, prompt_logprobs_from: int = -1
) -> SamplingParams:
    """The request's sampling fields; those it leaves out have the defaults. Raises InvalidRequestError."""
    default = SamplingParams()
    return SamplingParams(
        temperature=_or(request.temperature, default.temperature),
        top_p=_or(request.top_p, default.top_p),
        # 0 is how several clients say off.
        top_k=_or(request.top_k, default.top_k) or default.top_k,
        min_p=_or(request.min_p, default.min_p),
        max_tokens=max_tokens,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=_or(request.ignore_eos, default.ignore_eos),
        skip_special_tokens=_or(request.skip_special_tokens, default.skip_special_tokens),
        seed=request.seed,
        repetition_penalty=_or(request.repetition_penalty, default.repetition_penalty),
        presence_penalty=_or(request.presence_penalty, default.presence_penalty),
        frequency_penalty=_or(request.frequency_penalty, default.frequency_penalty),
        logit_bias=_logit_bias(request.logit_bias or {}),
        min_tokens=_or(request.min_tokens, default.min_tokens),
        keep_stop=bool(request.no_stop_trim or request.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs_from=prompt_logprobs_from,
        max_drafts=_max_drafts(request.speculative),
    )


def limit_name(request: CommonRequest) -> str:
    """The field that bounds the answer's length; the newer name counts if both are given."""
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


def max_tokens_of(request: CommonRequest, *, least: int, default: int | None) -> int | None:
    """The bound on the answer's length. Raises InvalidRequestError below `least`."""
    name = limit_name(request)
    wanted = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if wanted is None:
        return default
    if wanted < least:
        raise InvalidRequestError(f"{name} is {wanted}; it must lie in {least}..{MAX_INT32}.", param=name)
    return wanted


def check_num_answers(num_prompts: int, n: int) -> None:
    """Bound what one request starts. Raises InvalidRequestError."""
    if num_prompts * n > MAX_ANSWERS:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={n} ask for {num_prompts * n} answers; at most {MAX_ANSWERS} are allowed.",
            param="prompt",
        )


def check_logprobs(name: str, wanted: int, limits: Limits) -> int:
    """A number of alternatives. Raises InvalidRequestError."""
    most = min(limits.max_logprobs, limits.vocab_size)
    if not 0 <= wanted <= most:
        raise InvalidRequestError(f"{name} is {wanted}; it must lie in 0..{most} (--max-logprobs).", param=name)
    return wanted


def _logit_bias(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    if len(given) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(
            f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are allowed.", param="logit_bias"
        )
    for name in given:
        if not _TOKEN_ID.fullmatch(name):
            raise InvalidRequestError(
                f"logit_bias has the key {shorten(name, 40)!r}; keys are token ids, as decimal numbers.",
                param="logit_bias",
            )
    return tuple(sorted((int(name), value) for name, value in given.items()))


def _max_drafts(given: Speculative | None) -> int | None:
    if given is None:
        return None
    most = given.num_draft_tokens
    if most is not None and not 0 <= most <= MAX_DRAFTS:
        raise InvalidRequestError(
            f"speculative.num_draft_tokens is {most}; it must lie in 0..{MAX_DRAFTS}.",
            param="speculative.num_draft_tokens",
        )
    return 0 if given.enabled is False else most


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
