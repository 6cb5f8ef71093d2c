"""The random numbers of kernels/noise.py as Triton device functions: the same integers, noise within 1e-5 of theirs.

A draw costs noise for every token, so the noise takes the device's approximate logarithms. A token's noise still
depends on its seed, position and column only, and every kernel that compares perturbed logits takes it from here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels import noise

_M1 = tl.constexpr(noise.M1)
_M2 = tl.constexpr(noise.M2)
_STEP = tl.constexpr(noise.STEP)
_A = tl.constexpr(noise.A)
_B = tl.constexpr(noise.B)
_STEP_INVERSE = tl.constexpr(pow(noise.STEP, -1, 2**32))
_LOG2_E = tl.constexpr(1.4426950408889634)
_SERIES_BELOW = tl.constexpr(2.0**-4)


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
def step_columns(columns, key_a):
    """Where the hash of each column starts, uint32."""
    return columns.to(tl.uint32) * _STEP + key_a


@triton.jit
def unstep_columns(stepped, key_a):
    """The columns that `step_columns` was given, int32."""
    return ((stepped - key_a) * tl.full([], _STEP_INVERSE, tl.uint32)).to(tl.int32)


@triton.jit
def hash_stepped(stepped, key_b):
    """The 32 hash bits of each column, uint32, from what `step_columns` gives."""
    x = (stepped ^ (stepped >> 16)) * _M1 + key_b
    x = (x ^ (x >> 15)) * _M2
    return x ^ (x >> 16)


@triton.jit
def gumbel(bits, INSTRUCTION: tl.constexpr):
    """Standard Gumbel noise from hash bits in units of log 2, and 0.5288 lower: `-log2(-log2(1 - u))`, float32.

    INSTRUCTION: take the logarithms of the device (False in the interpreter). Theirs are off by 2**-22, absolutely
    between 1/2 and 2 and relatively elsewhere (PTX ISA, lg2.approx). That is too much for -log2(1 - u) where u is
    small, so it is a polynomial there (of least largest error, relatively 4e-8). The noise, in units of 1, is off by
    6e-6 at most.
    """
    uniform = tl.fma((bits & 0x7FFFFFFF).to(tl.int32).to(tl.float32), 2.0**-31, 2.0**-32)
    uniform = tl.minimum(uniform, 1.0 - 2.0**-24)
    series = tl.fma(uniform, 0.27588683 * _LOG2_E, 0.33237038 * _LOG2_E)
    series = tl.fma(series, uniform, 0.50001007 * _LOG2_E)
    series = tl.fma(series, uniform, 1.0 * _LOG2_E) * uniform
    waiting = tl.where(uniform < _SERIES_BELOW, series, _minus_log2(1.0 - uniform, INSTRUCTION))
    return _minus_log2(waiting, INSTRUCTION)


@triton.jit
def perturb_scale(temperature):
    """What `perturb` multiplies logits by."""
    return tl.div_rn(_LOG2_E, temperature)


@triton.jit
def perturb(logits, scale, stepped, key_b, INSTRUCTION: tl.constexpr):
    """Float32 logits over temperature plus the noise of their columns, in the units of `gumbel`.

    Rounded once, by an instruction that no compiler takes apart, so that all kernels get the same bits.
    """
    return tl.fma(logits, scale, gumbel(hash_stepped(stepped, key_b), INSTRUCTION))


@triton.jit
def _minus_log2(x, INSTRUCTION: tl.constexpr):
    if INSTRUCTION:
        # Triton's minus is a subtraction; this one costs nothing, as part of the instruction that takes the result.
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1; neg.f32 $0, $0;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return -tl.log2(x)
