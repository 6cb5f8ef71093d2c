"""SamplingParams: names, ranges, defaults and validation of everything that steers one request's tokens."""

from __future__ import annotations

import math

import msgspec

from engine.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Longest stop string, in characters."""
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 1024
"""Most entries of one request's logit_bias."""
MAX_BIAS = 100.0
MAX_DRAFTS = 128
"""Most drafted tokens of one request that a step verifies."""
GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this are greedy."""
MAX_SEED = 2**63 - 1
MAX_INT32 = 2**31 - 1


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How one request samples and when it ends. Built by `checked`, which raises InvalidRequestError."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    """None until the front draws one (EngineClient), so that a replayed request is the same request."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt and output."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Taken off the logits of tokens in the output once per occurrence."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added to its logit), each token once."""
    min_tokens: int = 0
    """The first so many output tokens are no end-of-sequence or stop tokens, and hold no stop string that counts."""
    keep_stop: bool = False
    """The stop string that ends the text stays in it."""
    logprobs: int = -1
    """Alternatives reported with each output token's logprob; 0: its own only; -1: no logprobs."""
    may_shorten: bool = False
    """max_tokens is only a default: where less fits, less will do."""
    prompt_logprobs_from: int = -1
    """First prompt token whose logprob is reported (the prompt's first token has none to report); -1: none."""
    max_drafts: int | None = None
    """Drafted tokens a step may verify for it at most; None: as many as the server drafts; 0: none."""

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def of_choice(self, index: int) -> SamplingParams:
        """Of one of several answers to a prompt. Without a seed each request draws its own."""
        if self.seed is None or index == 0:
            return self
        return msgspec.structs.replace(self, seed=seed_of_choice(self.seed, index))

    @property
    def has_penalties(self) -> bool:
        """What has been said before changes the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusts_logits(self) -> bool:
        """The logits are changed before temperature and filters."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0

    def checked(self, vocab_size: int) -> SamplingParams:
        """Return self if every value lies in its range; raise InvalidRequestError naming field, value and range."""
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_INT32:
            raise InvalidRequestError(
                f"top_k is {self.top_k}; it must be -1 (off) or lie in 1..{MAX_INT32}.", param="top_k"
            )
        if self.max_tokens is not None and not 0 <= self.max_tokens <= MAX_INT32:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens}; it must lie in 0..{MAX_INT32}.", param="max_tokens"
            )
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        most = MAX_INT32 if self.max_tokens is None else self.max_tokens
        if not 0 <= self.min_tokens <= most:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it must lie in 0..{most}"
                f"{'' if self.max_tokens is None else ', as max_tokens is'}.",
                param="min_tokens",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
                param="logit_bias",
            )
        for token, bias in self.logit_bias:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"logit_bias names token {token}; ids run from 0 to {vocab_size - 1}.", param="logit_bias"
                )
            _check_float("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs_from", self.prompt_logprobs_from)):
            if not -1 <= value <= MAX_INT32:
                raise InvalidRequestError(f"{name} is {value}; it must not be negative.", param=name)
        if self.max_drafts is not None and not 0 <= self.max_drafts <= MAX_DRAFTS:
            raise InvalidRequestError(
                f"max_drafts is {self.max_drafts}; it must lie in 0..{MAX_DRAFTS}.", param="max_drafts"
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(self.stop)} strings; at most {MAX_STOP_STRINGS} are allowed.", param="stop"
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidRequestError(
                    f"a stop string has {len(text)} characters; each needs 1 to {MAX_STOP_LENGTH}.", param="stop"
                )
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                f"stop_token_ids has {len(self.stop_token_ids)} ids; at most {MAX_STOP_IDS} are allowed.",
                param="stop_token_ids",
            )
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids holds {token}; ids run from 0 to {vocab_size - 1}.", param="stop_token_ids"
                )
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise InvalidRequestError(f"seed is {self.seed}; it must lie in 0..{MAX_SEED}.", param="seed")
        return self


def seed_of_choice(seed: int, index: int) -> int:
    """The seed of one of several answers to a prompt; the first one's is the request's own."""
    return (seed + index * 0x9E3779B97F4A7C15) & MAX_SEED


def _check_float(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g}].", param=name)
