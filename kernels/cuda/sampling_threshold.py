"""The smallest scaled logit that passes a row's filters, exactly and without a sort: device functions of one program.

Top-k and top-p ask the same: the smallest v among a row's values for which F(v), the weight above v, is less than a
limit. For top-k every token weighs 1 and the limit is k; for top-p a token weighs its probability and the limit is p.
F falls as v rises, so bounds on v close in on the answer:

1. Spans alone (sampling_summary.py) bound F from below, and so v: a span whose largest logit is above v has at least
   that one token above v, and at least its whole weight less 63 tokens of weight exp(v).
2. Only tokens of spans with something above that bound can be the answer. If those above it are at most FOUND, they
   are copied together; else some passes over the spans, with several pivots each, narrow the bounds first. That is the
   slow way of flat rows with a large k or p.
3. Among up to _RANKED tokens every one is compared with every other; more are bisected.

Bounds are kept as int32 keys, which are ordered as the floats are. The lower one is out, the upper one is in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.cuda.sampling_summary import FOUND, list_spans, read_spans, read_summary

_FOUND = tl.constexpr(FOUND)
_LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING_BELOW = tl.constexpr(-2139095042)
"""Key below that of -inf: nothing is known from below."""
_SPANS_AT_ONCE = tl.constexpr(32)
_RANKED = tl.constexpr(256)
_RANKED_AT_ONCE = tl.constexpr(16)
_BOUND_STEPS = tl.constexpr(12)
_PIVOTS = tl.constexpr(4)
_EVEN_PASSES = tl.constexpr(3)
"""Narrowing passes whose pivots lie evenly between the values of the bounds, not between their keys."""


@triton.jit
def _key_of(value):
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value_of(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _weights(values, peak, by_mass):
    return tl.where(by_mass, tl.exp2((values - peak) * _LOG2_E), 1.0)


@triton.jit
def _least_above(value, scaled, share, sums, peak, by_mass):
    """A lower bound of the weight above a value, from spans alone."""
    one = tl.exp2((value - peak) * _LOG2_E)
    mass = tl.maximum(share, share * sums - 63.0 * one)
    return tl.sum(tl.where(scaled > value, tl.where(by_mass, mass, 1.0), 0.0), axis=0)


@triton.jit
def filter_threshold(
    logits, vocab, temperature, scratch, num_spans, top_k, top_p, min_p, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    """The threshold of `kernels.sampling.filter_thresholds` for one row without NaN.

    scratch: the row's scratch memory, with sums. An infinite largest logit is returned as it is.
    """
    scaled, sums, _, _ = read_summary(scratch, num_spans, temperature, BLOCK)
    peak = tl.max(scaled, axis=0)
    threshold = peak
    if (peak > -float("inf")) & (peak < float("inf")):
        threshold = tl.where(min_p > 0.0, peak + tl.log(tl.maximum(min_p, 1e-37)), -float("inf"))
        total = tl.sum(tl.exp2((scaled - peak) * _LOG2_E) * sums, axis=0)
        low = tl.full([], NOTHING_BELOW, tl.int32)
        for stage in range(2):
            by_mass = stage == 1
            if tl.where(by_mass, top_p < 1.0, (top_k >= 1) & (top_k < vocab)):
                limit = tl.where(by_mass, top_p * total, top_k.to(tl.float32))
                value, listed = smallest_passing(
                    logits, vocab, temperature, scratch, num_spans, peak, by_mass, limit, low, EACH, BLOCK
                )
                threshold = tl.maximum(threshold, value)
                # What top-k lets through is all there is for top-p; both zeros must stay above the bound.
                low = tl.minimum(_key_of(value), tl.where(value == 0.0, -1, 0x7FFFFFFF)) - 1
                if (stage == 0) & (top_p < 1.0):
                    total = _mass_from(logits, vocab, temperature, scratch + 2 * num_spans, listed, value, peak, EACH)
    return threshold


@triton.jit
def _mass_from(logits, vocab, temperature, ids, listed, value, peak, EACH: tl.constexpr):
    mass = tl.zeros([_SPANS_AT_ONCE], tl.float32)
    for begin in range(0, listed, _SPANS_AT_ONCE):
        x, _, valid = read_spans(logits, vocab, temperature, ids, begin, listed, _SPANS_AT_ONCE, EACH)
        mass += tl.sum(tl.where(valid & (x >= value), tl.exp2((x - peak) * _LOG2_E), 0.0), axis=1)
    return tl.sum(mass, axis=0)


@triton.jit
def smallest_passing(
    logits,
    vocab,
    temperature,
    scratch,
    num_spans,
    peak,
    by_mass,
    limit,
    low,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The smallest value of the row with less than `limit` above it, and how many spans the scratch memory now lists.

    by_mass: weigh tokens by exp(x - peak), else by 1; low: key of a value that is too small. The listed spans are all
    those with a token that is at least the result.
    """
    ids = scratch + 2 * num_spans
    found = scratch + 3 * num_spans
    high = _key_of(peak)
    scaled, sums, spans, inside = read_summary(scratch, num_spans, temperature, BLOCK)
    share = tl.exp2((scaled - peak) * _LOG2_E)
    under = tl.min(tl.where(scaled > -float("inf"), scaled, peak), axis=0)
    if _least_above(under, scaled, share, sums, peak, by_mass) >= limit:
        over = peak
        for _ in range(_BOUND_STEPS):
            between = 0.5 * under + 0.5 * over
            too_low = _least_above(between, scaled, share, sums, peak, by_mass) >= limit
            under = tl.where(too_low, between, under)
            over = tl.where(too_low, over, between)
        low = tl.maximum(low, _key_of(under))
    # Written so because the key below all is a NaN.
    listed = list_spans(inside & ((scaled <= _value_of(low)) == 0), spans, ids)

    above = tl.full([], 0.0, tl.float32)
    num_above = tl.full([], 0, tl.int32)
    num_between = tl.full([], 0, tl.int32)
    passes = tl.full([], 0, tl.int32)
    closing = True
    while closing:
        if num_between <= _FOUND:
            num_between = _copy_between(
                logits, vocab, temperature, ids, listed, _value_of(low), _value_of(high), found, EACH
            )
        closing = (num_between > _FOUND) & (high.to(tl.int64) - low.to(tl.int64) > 1)
        if closing:
            low, high, above, num_above, num_between = _narrow(
                logits,
                vocab,
                temperature,
                ids,
                listed,
                low,
                high,
                above,
                num_above,
                num_between,
                peak,
                by_mass,
                limit,
                passes,
                EACH,
            )
            passes += 1
    result = _value_of(high)
    if num_between <= _RANKED:
        result = _rank(found, num_between, result, above, peak, by_mass, limit)
    elif num_between <= _FOUND:
        index = tl.arange(0, _FOUND)
        x = tl.load(found + index, mask=index < num_between, other=-float("inf"))
        weights = _weights(x, peak, by_mass)
        while high.to(tl.int64) - low.to(tl.int64) > 1:
            pivot = _middle(low, high)
            too_low = above + tl.sum(tl.where(x > _value_of(pivot), weights, 0.0), axis=0) >= limit
            low = tl.where(too_low, pivot, low)
            high = tl.where(too_low, high, pivot)
        result = _value_of(high)
    return result, listed


@triton.jit
def _copy_between(logits, vocab, temperature, ids, listed, low, high, found, EACH: tl.constexpr):
    """Copy the values in (low, high] to `found` as far as there is room; returns how many there are."""
    tl.debug_barrier()
    num = tl.full([], 0, tl.int32)
    for begin in range(0, listed, _SPANS_AT_ONCE):
        x, _, valid = read_spans(logits, vocab, temperature, ids, begin, listed, _SPANS_AT_ONCE, EACH)
        taken = tl.reshape(valid & ((x <= low) == 0) & (x <= high), [_SPANS_AT_ONCE * 64]).to(tl.int32)
        place = num + tl.cumsum(taken, axis=0) - 1
        tl.store(found + place, tl.reshape(x, [_SPANS_AT_ONCE * 64]), mask=(taken > 0) & (place < _FOUND))
        num += tl.sum(taken, axis=0)
    tl.debug_barrier()
    return num


@triton.jit
def _narrow(
    logits,
    vocab,
    temperature,
    ids,
    listed,
    low,
    high,
    above,
    num_above,
    num_between,
    peak,
    by_mass,
    limit,
    passes,
    EACH: tl.constexpr,
):
    """One pass over the listed spans: closer bounds, weight and number above the upper one, number between."""
    part = tl.arange(0, _PIVOTS)
    pivots = _pivots(low, high, passes)
    weights = tl.zeros([_SPANS_AT_ONCE, _PIVOTS], tl.float32)
    counts = tl.zeros([_SPANS_AT_ONCE, _PIVOTS], tl.int32)
    for begin in range(0, listed, _SPANS_AT_ONCE):
        x, _, valid = read_spans(logits, vocab, temperature, ids, begin, listed, _SPANS_AT_ONCE, EACH)
        each = _weights(x, peak, by_mass)
        for one in tl.static_range(_PIVOTS):
            larger = valid & (x > _value_of(tl.sum(tl.where(part == one, pivots, 0), axis=0)))
            weight = tl.sum(tl.where(larger, each, 0.0), axis=1)
            count = tl.sum(larger.to(tl.int32), axis=1)
            weights += tl.where(part[None, :] == one, weight[:, None], 0.0)
            counts += tl.where(part[None, :] == one, count[:, None], 0)
    weight, count = tl.sum(weights, axis=0), tl.sum(counts, axis=0)
    too_low = weight >= limit
    # Both fall from pivot to pivot, so the closest pivot of each side has the least or the most of that side.
    num_from_low = tl.min(tl.where(too_low, count, num_above + num_between), axis=0)
    above = tl.max(tl.where(too_low, above, weight), axis=0)
    num_above = tl.max(tl.where(too_low, num_above, count), axis=0)
    low = tl.maximum(low, tl.max(tl.where(too_low, pivots, NOTHING_BELOW), axis=0))
    high = tl.minimum(high, tl.min(tl.where(too_low, high, pivots), axis=0))
    return low, high, above, num_above, num_from_low - num_above


@triton.jit
def _pivots(low, high, passes):
    """Keys strictly between two, in order and perhaps equal."""
    part = tl.arange(0, _PIVOTS) + 1
    start, end = _value_of(low), _value_of(high)
    # 32 below is e**-32 of the mass; from the key below all, a NaN, it starts there too.
    start = tl.where(start > -float("inf"), start, end - 32.0)
    even = _key_of(start + (end - start) * (part.to(tl.float32) / (_PIVOTS + 1)))
    gap = high.to(tl.int64) - low.to(tl.int64)
    keyed = (low.to(tl.int64) + gap * part // (_PIVOTS + 1)).to(tl.int32)
    pivots = tl.where(passes < _EVEN_PASSES, even, keyed)
    return tl.minimum(tl.maximum(pivots, low + 1), high - 1)


@triton.jit
def _rank(found, num, otherwise, above, peak, by_mass, limit):
    """The smallest of `num` values with less than `limit` above it, `otherwise` if none is; `above`: what else is."""
    mine = tl.arange(0, _RANKED)
    x = tl.load(found + mine, mask=mine < num, other=0.0)
    weights = tl.zeros([_RANKED, _RANKED_AT_ONCE], tl.float32)
    for begin in range(0, num, _RANKED_AT_ONCE):
        index = begin + tl.arange(0, _RANKED_AT_ONCE)
        other = tl.load(found + index, mask=index < num, other=-float("inf"))
        weights += tl.where(other[None, :] > x[:, None], _weights(other, peak, by_mass)[None, :], 0.0)
    passing = (mine < num) & (above + tl.sum(weights, axis=1) < limit)
    return tl.min(tl.where(passing, x, otherwise), axis=0)
