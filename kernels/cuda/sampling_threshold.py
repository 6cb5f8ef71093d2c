"""The smallest logit that passes a row's filters, exactly and without a sort: device functions of one program.

Top-k and top-p ask the same: the smallest v among a row's values for which F(v), the weight above v, is less than a
limit. For top-k every token weighs 1 and the limit is k; for top-p a token weighs its probability and the limit is p.
F falls as v rises, so a pass that takes F of several pivots between two bounds leaves the bounds of one gap. Bounds are
kept as int32 keys, which are ordered as the floats are; the lower one is out, the upper one is in. Keys of short floats
need no more than their upper bits, for which two or three passes of eight pivots are the rule.

Dividing by the temperature keeps the order, so all that is done to logits as they are. Two of them may be equal after
it: so the result is what is compared, over the temperature, with tokens over the temperature.

Values are a row's candidates (sampling_candidates.py), if they are enough, else the row. Weights are summed as
integers, so that no order of the candidates gives another sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.cuda.sampling_candidates import STATE
from kernels.cuda.sampling_summary import order_key, value_of_key

_LOG2_E = tl.constexpr(1.4426950408889634)
_STATE = tl.constexpr(STATE)
_PIVOTS = tl.constexpr(8)
_AT_ONCE = tl.constexpr(512)
_SUMMED_AT_ONCE = tl.constexpr(2048)
_UNIT = tl.constexpr(2.0**40)


def unused_bits(dtype: torch.dtype) -> int:
    """Lower bits of a float32 that a number of a dtype leaves zero."""
    return {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[dtype]


@triton.jit
def row_threshold(logits, vocab, state, capacity, temperature, top_k, top_p, min_p, UNUSED: tl.constexpr):
    """The threshold of `kernels.sampling.filter_thresholds` for one row, and whether all that pass are candidates.

    state: this part of the row's scratch memory; the row's largest logit must be finite.
    """
    bound, peak, total = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    num = tl.load(state + 3).to(tl.int32, bitcast=True)
    threshold = tl.full([], -float("inf"), tl.float32)
    enough = False
    if num <= capacity:
        threshold, enough = _threshold(
            state + _STATE, num, bound, False, vocab, temperature, peak, total, top_k, top_p, min_p, UNUSED
        )
    if enough == 0:
        lowest = tl.full([], -float("inf"), tl.float32)
        threshold, _ = _threshold(
            logits, vocab, lowest, True, vocab, temperature, peak, total, top_k, top_p, min_p, UNUSED
        )
    return threshold, enough


@triton.jit
def _threshold(values, num, lowest, whole, vocab, temperature, peak, total, top_k, top_p, min_p, UNUSED: tl.constexpr):
    """The threshold, and whether the values were enough to tell.

    values: `num` logits, all of the row that are at least `lowest`; whole: all of the row; total: sum of
    exp((logit - peak) / temperature), needed for top-p without top-k.
    """
    limited = (top_k >= 1) & (top_k < vocab)
    enough = whole | (limited == 0) | (num >= top_k)
    least = tl.div_rn(peak, temperature) + tl.log(tl.maximum(min_p, 1e-37))
    threshold = tl.where(min_p > 0.0, least, -float("inf"))
    per_logit = _LOG2_E / temperature
    low = (order_key(lowest) >> UNUSED) - 1
    if limited & enough:
        key = _smallest_passing(values, num, low, peak, per_logit, top_k.to(tl.float32), False, UNUSED)
        threshold = tl.maximum(threshold, tl.div_rn(value_of_key(key << UNUSED), temperature))
        # What top-k lets through is all there is for top-p. Both zeros are the same value.
        low = tl.where(key == 0, -1, key) - 1
    if (top_p < 1.0) & enough:
        total *= _UNIT
        mass = _mass_above(values, num, low, peak, per_logit, UNUSED)
        if limited:
            total = mass
        else:
            enough = whole | (lowest == -float("inf")) | (mass >= top_p * total)
        key = _smallest_passing(values, num, low, peak, per_logit, top_p * total, True, UNUSED)
        threshold = tl.maximum(threshold, tl.div_rn(value_of_key(key << UNUSED), temperature))
    return threshold, enough


@triton.jit
def _read(values, num, begin, SIZE: tl.constexpr):
    index = begin + tl.arange(0, SIZE)
    return tl.load(values + index, mask=index < num, other=-float("inf")).to(tl.float32)


@triton.jit
def _masses(x, peak, per_logit):
    """exp2((x - peak) * per_logit), int64 in units of 1 / _UNIT."""
    return (tl.exp2((x - peak) * per_logit) * _UNIT).to(tl.int64)


@triton.jit
def _mass_above(values, num, low, peak, per_logit, UNUSED: tl.constexpr):
    """Mass of the values with a key above `low`, float32."""
    mass = tl.zeros([_SUMMED_AT_ONCE], tl.int64)
    for begin in range(0, num, _SUMMED_AT_ONCE):
        x = _read(values, num, begin, _SUMMED_AT_ONCE)
        mass += tl.where((order_key(x) >> UNUSED) > low, _masses(x, peak, per_logit), 0)
    return tl.sum(mass, axis=0).to(tl.float32)


@triton.jit
def _smallest_passing(values, num, low, peak, per_logit, limit, BY_MASS: tl.constexpr, UNUSED: tl.constexpr):
    """Key (of the upper bits) of the smallest value above that of `low` with less than `limit` above it.

    BY_MASS: weigh values by `_masses`, else by 1.
    """
    high = order_key(peak) >> UNUSED
    gap = (high.to(tl.int64) - low.to(tl.int64)).to(tl.uint32)
    while gap > 1:
        pivots = _pivot(low, gap, tl.arange(0, _PIVOTS) + 1)
        # The largest float32 with the key's upper bits, so that no value with these is above it.
        edges = value_of_key(((pivots + 1) << UNUSED) - 1)
        if BY_MASS:
            above = tl.zeros([_PIVOTS, _AT_ONCE], tl.int64)
        else:
            above = tl.zeros([_PIVOTS, _AT_ONCE], tl.int32)
        following = _read(values, num, 0, _AT_ONCE)
        for begin in range(0, num, _AT_ONCE):
            x = following
            following = _read(values, num, begin + _AT_ONCE, _AT_ONCE)
            larger = x[None, :] > edges[:, None]
            if BY_MASS:
                above += tl.where(larger, _masses(x, peak, per_logit)[None, :], 0)
            else:
                above += larger.to(tl.int32)
        num_too_low = tl.sum((tl.sum(above, axis=1).to(tl.float32) >= limit).to(tl.int32), axis=0)
        old = low
        low = tl.where(num_too_low > 0, _pivot(old, gap, num_too_low), old)
        high = tl.where(num_too_low < _PIVOTS, _pivot(old, gap, num_too_low + 1), high)
        gap = (high.to(tl.int64) - low.to(tl.int64)).to(tl.uint32)
    return high


@triton.jit
def _pivot(low, gap, part):
    """Key at `part` of _PIVOTS parts of a gap of at least 2, but strictly inside it."""
    part = part.to(tl.uint32)
    offset = gap // _PIVOTS * part + gap % _PIVOTS * part // _PIVOTS
    return low + tl.minimum(tl.maximum(offset, 1), gap - 1).to(tl.int32)
