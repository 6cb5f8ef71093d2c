"""The few tokens of a row that its filters can let through, copied together: two launches after the summary.

1. One program a row finds a *bound* from the summary: a value that the smallest token that passes is not below. At
   least as many tokens are above a value as spans have their largest logit above it, which is enough for top-k. For
   top-p the mass that is not above it counts: all of the spans that have nothing above it, and of each other span that
   of up to 63 tokens, which is estimated from one token of every span. The estimate is wide enough to fail about never
   where the order of the vocabulary is as good as random; who uses the candidates checks that they are enough.
2. Many programs a row read the spans again that reach the bound and append what does, in any order.

A row's scratch memory goes on, after the summary's two parts, with

    [STATE]     the bound, NaN where nothing is to be copied; the largest logit, NaN where the row has a NaN; the sum of
                exp(logit - largest) over the temperature, where there are sums; bits of the number of candidates
    [capacity]  the candidates' logits, as they are
    [capacity]  bits of their columns

More candidates than `capacity` are counted but not kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import is_wanted
from kernels.cuda.sampling_summary import (
    SPAN,
    SPANS_IN_TILE,
    SUMS,
    SUMS_FOR_TOP_P,
    TILE,
    each_of,
    largest_or_nan,
    num_chunks_of,
    num_spans_of,
    row_filters,
    span_start,
    summarise,
)
from kernels.sampling import GREEDY_TEMPERATURE

CAPACITY = 16384
"""Of a row's candidates; more are looked for in the whole row, by one program."""
STATE = 16
"""Words of a row's state, with those that put what follows at a multiple of 64 bytes."""
MOST_REGISTERS = 128
"""Of the programs of whole rows: two fit on a multiprocessor, and all of 256 rows run at once."""

BOUND_WARPS = 8
"""Of the programs that sum up whole rows."""

_STATE = tl.constexpr(STATE)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_GROUP = tl.constexpr(SPANS_IN_TILE)
_TILE = tl.constexpr(TILE)
_SPAN = tl.constexpr(SPAN)
_OTHERS_IN_SPAN = tl.constexpr(SPAN - 1)
_LOG2_E = tl.constexpr(1.4426950408889634)
_PIVOTS = tl.constexpr(8)
_ROUNDS = tl.constexpr(6)
_CLOSE = tl.constexpr(0.1)
"""Closer bounds, as exponents of two, would not save many candidates."""
_NO_MASS = tl.constexpr(30.0)
"""A logit this far below the largest, over the temperature, has no mass."""
_LOWER = tl.constexpr(1e-6)
"""A bound is taken this much lower: over the temperature, after rounding, what reaches it must reach it before too."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """Scratch memory of rows of logits, as the kernels that read it take it."""

    scratch: Tensor
    words: int
    num_spans: int
    capacity: int


def find_candidates(
    logits: Tensor,
    parameters: tuple[Tensor | None, ...],
    *,
    purpose: int = 0,
    draws: bool = False,
    width: int = 0,
    capacity: int = CAPACITY,
) -> Candidates:
    """Summary, bound and candidates of each row; arguments as in `sampling_summary.summarise`.

    width: if not 0, the candidates are those for the `width` largest logits, whatever the parameters.
    """
    rows, vocab = logits.shape
    num_spans = num_spans_of(vocab)
    capacity = min(capacity, num_spans * SPAN)
    words = 2 * num_spans + STATE + 2 * capacity
    sums = SUMS if width else SUMS_FOR_TOP_P
    scratch = summarise(logits, words, parameters, purpose=purpose, draws=draws, filters=width == 0, sums=sums)
    each, pdl = each_of(logits), is_wanted(logits)
    bound: Any = bound_rows[(rows,)]
    bound(
        logits,
        logits.stride(0),
        vocab,
        num_spans,
        scratch,
        words,
        *parameters[:4],
        width or None,
        capacity,
        EACH=each,
        BLOCK=triton.next_power_of_2(num_spans),
        PDL=pdl,
        num_warps=BOUND_WARPS,
        maxnreg=MOST_REGISTERS,
        launch_pdl=pdl,
    )
    chunks, tiles_each, _ = num_chunks_of(rows, vocab)
    collect: Any = collect_candidates[(rows * chunks,)]
    collect(
        logits,
        logits.stride(0),
        vocab,
        triton.cdiv(vocab, TILE),
        tiles_each,
        scratch,
        words,
        capacity,
        EACH=each,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return Candidates(scratch, words, num_spans, capacity)


@triton.jit
def bound_rows(
    logits,
    stride,
    vocab,
    num_spans,
    scratch,
    words,
    temperature,
    top_k,
    top_p,
    min_p,
    width,
    capacity,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: bound and state of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    scratch += row * words
    state = scratch + 2 * num_spans
    spans = tl.arange(0, BLOCK)
    inside = spans < num_spans
    heat = tl.full([], 1.0, tl.float32)
    floor = tl.full([], -float("inf"), tl.float32)
    limited = True
    by_mass = False
    num_sums = num_spans
    k = tl.full([], 0, tl.int64)
    p = heat
    filters = True
    if temperature is None:
        k += width
    else:
        heat = tl.load(temperature + row)
        k, p, m = tl.load(top_k + row).to(tl.int64), tl.load(top_p + row), tl.load(min_p + row)
        filters = (heat >= _GREEDY) & row_filters(vocab, k, p, m)
        limited = (k >= 1) & (k < vocab)
        by_mass = (p < 1.0) & (limited == 0)
        num_sums = tl.where(by_mass, num_spans, 0)
        floor = heat * tl.log(tl.maximum(m, 1e-37))
    bound = tl.full([], float("nan"), tl.float32)
    if filters:
        largest = tl.load(scratch + spans, mask=inside, other=-float("inf"))
        peak = largest_or_nan(largest)
        tl.store(state + 1, peak)
        if temperature is not None:
            # An infinite largest logit is drawn whatever the filters are.
            bound = tl.where(peak == float("inf"), peak, bound)
        if (peak > -float("inf")) & (peak < float("inf")):
            per_logit = _LOG2_E / heat
            mass = tl.load(scratch + num_spans + spans, mask=spans < num_sums, other=0.0)
            mass *= tl.exp2((largest - peak) * per_logit)
            total = tl.sum(mass, axis=0)
            tl.store(state + 2, total)
            if limited | by_mass:
                columns = span_start(spans, EACH)
                mask = columns < vocab
                sample = tl.load(logits + row * stride + columns, mask=mask, other=float("inf")).to(tl.float32)
                limit = tl.where(by_mass, 0.999 * (1.0 - p) * total, k.to(tl.float32))
                bound = _bound(largest, mass, sample, peak, per_logit, vocab, limit, by_mass)
            else:
                bound = peak + floor
            bound -= (tl.abs(bound) + tl.abs(peak)) * _LOWER
        num = tl.full([], 0, tl.int32)
        if (bound == -float("inf")) & (vocab > capacity):
            num += vocab
            bound = tl.full([], float("nan"), tl.float32)
        tl.store(state + 3, num.to(tl.float32, bitcast=True))
    tl.store(state, bound)


@triton.jit
def _bound(largest, mass, sample, peak, per_logit, vocab, limit, by_mass):
    """The largest value found that the smallest passing token is not below, -inf if none is.

    largest, mass, sample: of each span the largest logit, the sum of weights exp((logit - peak) over the temperature),
    and some token's logit, inf where there is none; limit: by_mass the most mass that may not be above the bound, else
    the fewest tokens that must be.
    """
    num_seen = tl.sum((sample < float("inf")).to(tl.float32), axis=0)
    some = tl.minimum(largest, sample)
    low = tl.min(tl.where(some > -float("inf"), some, peak), axis=0)
    low = tl.where(by_mass, tl.maximum(low, peak - _NO_MASS * _LOG2_E / per_logit), low)
    high = peak
    bound = tl.full([], -float("inf"), tl.float32)
    rounds = tl.full([], 0, tl.int32)
    while (rounds < _ROUNDS) & ((high - low) * per_logit > _CLOSE):
        pivots = low + (high - low) * (tl.arange(0, _PIVOTS).to(tl.float32) / _PIVOTS)
        if by_mass:
            weights = tl.exp2((sample - peak) * per_logit)
            sampled = tl.sum(tl.where(sample[None, :] <= pivots[:, None], weights[None, :], 0.0), axis=1)
            # The sampled weights are at most `one`, so their variance is at most `one` times their mean: four standard
            # deviations, and some for what is too rare to be seen.
            one = tl.exp2((pivots - peak) * per_logit)
            mean = sampled / num_seen
            mean = tl.minimum(one, mean + 4.0 * tl.sqrt(mean * one / num_seen) + 8.0 * one / num_seen)
            others = _OTHERS_IN_SPAN * mean
            fine = tl.sum(tl.where(largest[None, :] > pivots[:, None], others[:, None], mass[None, :]), axis=1) <= limit
        else:
            # Two counts at once; there are fewer than 32768 spans.
            under = (sample[None, :] <= pivots[:, None]).to(tl.int32) * 65536
            counts = tl.sum((largest[None, :] > pivots[:, None]).to(tl.int32) + under, axis=1)
            above = num_seen - (counts >> 16).to(tl.float32)
            above = (above - 4.0 * tl.sqrt(above) - 8.0) * (vocab / num_seen)
            fine = tl.maximum((counts & 0xFFFF).to(tl.float32), above) >= limit
        bound = tl.maximum(bound, tl.max(tl.where(fine, pivots, -float("inf")), axis=0))
        high = tl.min(tl.where(pivots > bound, pivots, high), axis=0)
        low = tl.maximum(low, bound)
        rounds += 1
    return bound


@triton.jit
def collect_candidates(
    logits,
    stride,
    vocab,
    num_tiles,
    tiles_each,
    scratch,
    words,
    capacity,
    EACH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the candidates of some consecutive tiles of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    chunks = tl.cdiv(num_tiles, tiles_each)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    first = (tl.program_id(0) % chunks) * tiles_each
    last = tl.minimum(first + tiles_each, num_tiles)
    logits += row * stride
    scratch += row * words
    state = scratch + 2 * num_tiles * _GROUP
    values = state + _STATE
    bound = tl.load(state)
    # Not where it is a NaN.
    if bound == bound:
        counter = (state + 3).to(tl.pointer_type(tl.int32))
        spans = tl.arange(0, _GROUP)
        for tile in range(first, last):
            reaches = tl.load(scratch + tile * _GROUP + spans) >= bound
            if tl.max(reaches.to(tl.int32), axis=0) > 0:
                num = tl.zeros([_GROUP], tl.int32)
                for part in tl.static_range(_SPAN // EACH):
                    _, _, taken = _taken(logits, vocab, tile, part, reaches, bound, EACH)
                    num += tl.sum(taken.to(tl.int32), axis=1)
                begin = tl.atomic_add(counter, tl.sum(num, axis=0), sem="relaxed")
                begin += tl.cumsum(num, axis=0) - num
                # Again, now from the cache: all places at once would be more than the registers hold.
                for part in range(_SPAN // EACH):
                    x, columns, taken = _taken(logits, vocab, tile, part, reaches, bound, EACH)
                    place = begin[:, None] + tl.cumsum(taken.to(tl.int32), axis=1) - 1
                    fits = taken & (place < capacity)
                    tl.store(values + place, x, mask=fits)
                    tl.store(values + capacity + place, columns.to(tl.float32, bitcast=True), mask=fits)
                    begin += tl.sum(taken.to(tl.int32), axis=1)


@triton.jit
def _taken(logits, vocab, tile, part, reaches, bound, EACH: tl.constexpr):
    """Logits, columns and whether they reach the bound, of one part of those spans of a tile that do."""
    inner = tl.arange(0, _GROUP)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    columns = tile * _TILE + part * (_GROUP * EACH) + inner
    inside = reaches[:, None] & (columns < vocab)
    x = tl.load(logits + columns, mask=inside, other=-float("inf")).to(tl.float32)
    return x, columns, inside & (x >= bound)
