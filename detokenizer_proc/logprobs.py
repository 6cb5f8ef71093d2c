"""Logprobs of a step with the bytes of their tokens, as faces show them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.ipc.messages import Logprobs, TokenLogprob, unpack_f32, unpack_i32


def token_logprobs(table: Sequence[bytes], tokens: Sequence[int], logprobs: Logprobs) -> list[TokenLogprob]:
    """One per token; `table` holds the bytes of every token id."""
    width = logprobs.width
    ids, tops = unpack_i32(logprobs.ids).tolist(), unpack_f32(logprobs.tops).tolist()
    found = []
    for index, (token, chosen) in enumerate(zip(tokens, unpack_f32(logprobs.chosen).tolist(), strict=True)):
        part = slice(index * width, (index + 1) * width)
        top = [(other, value, _bytes(table, other)) for other, value in zip(ids[part], tops[part], strict=True)]
        found.append(TokenLogprob(token, None if math.isnan(chosen) else chosen, _bytes(table, token), top))
    return found


def _bytes(table: Sequence[bytes], token: int) -> bytes:
    # Some models have more ids than their tokenizer has tokens.
    return table[token] if token < len(table) else b""
