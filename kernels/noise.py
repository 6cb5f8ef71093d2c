"""Counter-based random numbers: every draw is a pure function of (seed, position, purpose, column).

The hash works on 32-bit words with wrapping arithmetic; `>>` is the logical shift. With

    mix(x):  x ^= x >> 16;  x *= M1;  x ^= x >> 15;  x *= M2;  x ^= x >> 16

a row's two keys start from the constants A and B and absorb the words seed_low, seed_high, position, purpose one after
the other, `key = mix((key ^ word) + STEP)`. Column c of the row is then

    x = c * STEP + key_a;  x ^= x >> 16;  x *= M1;  x += key_b;  x ^= x >> 15;  x *= M2;  x ^= x >> 16

The low 31 bits n of x give the uniform number `u = min((float32(n) + 0.5) * 2**-31, 1 - 2**-24)`, strictly inside
(0, 1) and finest near 0. A kernel in another language that follows these lines draws the same integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

SAMPLE = 0
"""Purpose of a draw: choosing a token."""
ACCEPT = 1
"""Purpose of a draw: accepting a drafted token."""
RESIDUAL = 2
"""Purpose of a draw: the token after a rejected draft."""

# All below 2**31, so that they are the same number as signed and unsigned words.
M1 = 0x7FEB352D
M2 = 0x46CA68B5
STEP = 0x1E3779B9
A = 0x2545F491
B = 0x5851F42D


def uniform_rows(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """One uniform number in (0, 1) per row: column 0 of the row's stream.

    seeds, positions: int64 `[rows]` (positions below 2**32); purpose: SAMPLE, ACCEPT or RESIDUAL.
    Returns float32 `[rows]`.
    """
    return _uniform(seeds, positions, purpose, 1).squeeze(1)


def gumbel_noise(seeds: Tensor, positions: Tensor, purpose: int, num_columns: int) -> Tensor:
    """Standard Gumbel noise, `-log(-log(1 - u))`, float32 `[rows, num_columns]`; arguments as in uniform_rows.

    `argmax(logits + noise)` is a draw from softmax(logits). Source: Gumbel, 1954; Maddison et al., "A* Sampling", 2014.
    """
    return _uniform(seeds, positions, purpose, num_columns).neg_().log1p_().neg_().log_().neg_()


def _uniform(seeds: Tensor, positions: Tensor, purpose: int, num_columns: int) -> Tensor:
    bits = hash_columns(seeds, positions, purpose, num_columns)
    return bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)


def hash_columns(seeds: Tensor, positions: Tensor, purpose: int, num_columns: int) -> Tensor:
    """The 32 hash bits of each column as int32 `[rows, num_columns]`; arguments as in uniform_rows."""
    words = (seeds.to(torch.int32), (seeds >> 32).to(torch.int32), positions.to(torch.int32))
    columns = torch.arange(num_columns, dtype=torch.int32, device=seeds.device).mul_(STEP)
    x = columns + _row_key(A, words, purpose)
    _xor_shift(x, 16)
    x.mul_(M1).add_(_row_key(B, words, purpose))
    _xor_shift(x, 15)
    x.mul_(M2)
    return _xor_shift(x, 16)


def _row_key(start: int, words: tuple[Tensor, ...], purpose: int) -> Tensor:
    key = torch.full_like(words[0], start)
    for word in (*words, purpose):
        key = (key ^ word).add_(STEP)
        _xor_shift(key, 16).mul_(M1)
        _xor_shift(key, 15).mul_(M2)
        _xor_shift(key, 16)
    return key.unsqueeze(1)


def _xor_shift(x: Tensor, shift: int) -> Tensor:
    """`x ^= x >> shift` in place with a logical shift (torch shifts signed words arithmetically)."""
    return x.bitwise_xor_((x >> shift).bitwise_and_((1 << (32 - shift)) - 1))
