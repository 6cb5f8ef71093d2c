"""The random numbers of kernels/noise.py as Triton device functions; a launched kernel draws the same integers."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import noise

_M1 = tl.constexpr(noise.M1)
_M2 = tl.constexpr(noise.M2)
_TWICE_M2 = tl.constexpr(2 * noise.M2)
_STEP = tl.constexpr(noise.STEP)
_A = tl.constexpr(noise.A)
_B = tl.constexpr(noise.B)


@triton.jit
def _absorb(key, word):
    key = (key ^ word) + _STEP
    key = (key ^ (key >> 16)) * _M1
    key = (key ^ (key >> 15)) * _M2
    return key ^ (key >> 16)


@triton.jit
def row_keys(seed, position, PURPOSE: tl.constexpr):
    """A row's two uint32 keys from its int64 seed and position."""
    key_a = tl.full([], _A, tl.uint32)
    key_b = tl.full([], _B, tl.uint32)
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    purpose = tl.full([], PURPOSE, tl.uint32)
    key_a = _absorb(_absorb(_absorb(_absorb(key_a, low), high), place), purpose)
    key_b = _absorb(_absorb(_absorb(_absorb(key_b, low), high), place), purpose)
    return key_a, key_b


@triton.jit
def _before_last_product(stepped, key_b):
    x = (stepped ^ (stepped >> 16)) * _M1 + key_b
    return x ^ (x >> 15)


@triton.jit
def step_columns(columns, key_a):
    """Where the hash of each column starts, uint32; what `screen_columns` takes."""
    return columns.to(tl.uint32) * _STEP + key_a


@triton.jit
def hash_columns(columns, key_a, key_b):
    """The 32 hash bits of each column, uint32."""
    x = _before_last_product(step_columns(columns, key_a), key_b) * _M2
    return x ^ (x >> 16)


@triton.jit
def screen_columns(stepped, OFFSET: tl.constexpr, key_b):
    """What `screened_bits` makes a lower bound of the low 31 hash bits of, for the columns OFFSET further on; uint32.

    The last step of the hash, `x ^= x >> 16`, leaves the upper half of x alone. Twice M2 shifts bit 31 out, so that the
    smallest of these words belongs to the smallest bound. Four instructions cheaper than the hash.
    """
    return _before_last_product(stepped + (OFFSET * _STEP) % 2**32, key_b) * _TWICE_M2


@triton.jit
def screened_bits(screen):
    """A lower bound, less than 2**16 too low, of the low 31 hash bits."""
    return (screen >> 1) & 0x7FFF0000


@triton.jit
def gumbel(bits):
    """Standard Gumbel noise, float32, from hash bits: `-log(-log1p(-u))`, decreasing in the low 31 bits.

    log1p by log, after Kahan: log(w) is exact enough for the w that 1 - u was rounded to, and u / (1 - w) puts the
    rounding right.
    """
    uniform = ((bits & 0x7FFFFFFF).to(tl.float32) + 0.5) * (2.0**-31)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    rest = 1.0 - uniform
    missing = 1.0 - rest
    tiny = missing == 0.0
    waiting = -tl.log(rest) * (uniform / tl.where(tiny, 1.0, missing))
    return -tl.log(tl.where(tiny, uniform, waiting))
