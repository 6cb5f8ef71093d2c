"""SamplingParams: names, ranges, defaults and validation of everything that steers one request's tokens."""

from __future__ import annotations

import math

import msgspec

from engine.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
"""Longest stop string, in characters."""
MAX_STOP_IDS = 16
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

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def checked(self, vocab_size: int) -> SamplingParams:
        """Return self if every value lies in its range; raise InvalidRequestError naming field, value and range."""
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.top_k != -1 and not 1 <= self.top_k <= MAX_INT32:
            raise InvalidRequestError(
                f"top_k is {self.top_k}; it must be -1 (off) or lie in 1..{MAX_INT32}.", param="top_k"
            )
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MAX_INT32:
            raise InvalidRequestError(
                f"max_tokens is {self.max_tokens}; it must lie in 1..{MAX_INT32}.", param="max_tokens"
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


def _check_float(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if open_low else low <= value) and value <= high
    if not inside:
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} is {value}; it must lie in {bracket}{low:g}, {high:g}].", param=name)
