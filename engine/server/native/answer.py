"""What /generate says of one generation, whole or so far, as JSON."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import msgspec

from engine.ipc.messages import Ended, Finish, TokenLogprob
from engine.server.info import WEIGHT_VERSION

if TYPE_CHECKING:
    from engine.generation import Delta, Generation

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""

_encode = msgspec.json.encode


class Answer:
    """One generation's answer. Text, ids and logprobs are cumulative and kept as JSON: an event copies, it encodes
    only what is new."""

    def __init__(
        self,
        generation: Generation,
        *,
        index: int | None,
        num_prompt_tokens: int,
        top: int,
        with_text: bool,
        begin_s: float,
    ) -> None:
        """`index` in the batch, None if there is none; `top`: alternatives per token, -1 without logprobs; `begin_s`
        of the request on the monotonic clock."""
        self._generation = generation
        self._begin_s = begin_s
        self._head = b'{"text":"'
        self._tail = b"}" if index is None else b',"index":%d}' % index
        self._id = _encode(generation.label)
        self._num_prompt_tokens = num_prompt_tokens
        self._top = top
        self._with_text = with_text
        self._num_tokens = 0
        self._text = bytearray()
        self._ids = bytearray()
        self._output = _Scores(top > 0)
        self._input: bytes | None = None

    def add(self, delta: Delta) -> None:
        """Take new output."""
        # Strings are whole characters, so their escaped forms join to the escaped form of the whole.
        self._text += _encode(delta.text)[1:-1]
        _append(self._ids, _encode(delta.token_ids)[1:-1])
        self._num_tokens += len(delta.token_ids)
        if self._top >= 0:
            self._output.extend(delta.logprobs, self._with_text)

    def json(self, *, final: bool) -> bytes:
        """The answer so far; `final`, once the generation has ended: with finish_reason and the last facts."""
        ended = self._generation.ended if final else None
        meta = b'{"id":%b,"finish_reason":%b,"prompt_tokens":%d,"completion_tokens":%d,"weight_version":"%b"' % (
            self._id,
            b"null" if ended is None else _encode(finish_reason(ended)),
            self._num_prompt_tokens,
            self._num_tokens,
            WEIGHT_VERSION.encode(),
        )
        if ended is not None:
            latency_s = time.monotonic() - self._begin_s
            meta += b',"cached_tokens":%d,"e2e_latency":%.6f' % (ended.cached_tokens, latency_s)
        if self._top >= 0:
            meta += self._logprobs()
        return b'%b%b","output_ids":[%b],"meta_info":%b}%b' % (self._head, self._text, self._ids, meta, self._tail)

    def _logprobs(self) -> bytes:
        if self._input is None:  # complete before the first output
            scores = _Scores(self._top > 0)
            scores.extend(self._generation.prompt_logprobs, self._with_text)
            self._input = scores.json("input")
        return b'%b%b,"output_token_logprobs_length":%d' % (
            self._input,
            self._output.json("output"),
            self._output.num_tokens,
        )


class _Scores:
    """Logprobs of tokens, and of the most likely ones beside each if `with_tops`, as JSON lists without brackets."""

    def __init__(self, with_tops: bool) -> None:
        self.num_tokens = 0
        self._with_tops = with_tops
        self._chosen = bytearray()
        self._tops = bytearray()

    def extend(self, tokens: list[TokenLogprob], with_text: bool) -> None:
        if not tokens:
            return
        self.num_tokens += len(tokens)
        chosen = [_entry(token.logprob, token.id, token.bytes, with_text) for token in tokens]
        _append(self._chosen, _encode(chosen)[1:-1])
        if self._with_tops:
            tops = [
                None if token.logprob is None else [_entry(value, idx, raw, with_text) for idx, value, raw in token.top]
                for token in tokens
            ]
            _append(self._tops, _encode(tops)[1:-1])

    def json(self, kind: str) -> bytes:
        """`,"<kind>_token_logprobs":[...]` and the same for the tops."""
        name = kind.encode()
        text = b',"%b_token_logprobs":[%b]' % (name, self._chosen)
        return text + b',"%b_top_logprobs":[%b]' % (name, self._tops) if self._with_tops else text


def finish_reason(ended: Ended) -> dict[str, object]:
    """Why a generation ended, in SGLang's shape."""
    if ended.finish in (Finish.STOP_TOKEN, Finish.STOP_STRING):
        return {"type": "stop", "matched": ended.stop_reason}
    if ended.finish is Finish.LENGTH:
        return {"type": "length", "length": ended.num_tokens}
    return {"type": "abort", "message": "The request was aborted."}


def _entry(logprob: float | None, token: int, raw: bytes, with_text: bool) -> tuple[float | None, int, str | None]:
    if logprob is not None and not math.isfinite(logprob):
        logprob = LOWEST_LOGPROB
    return logprob, token, raw.decode("utf-8", "replace") if with_text else None


def _append(items: bytearray, more: bytes) -> None:
    if more:
        if items:
            items += b","
        items += more
