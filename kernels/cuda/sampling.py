"""Choosing a token per row without a sort; kernels/sampling.py says what is chosen.

Two launches: sampling_summary.py reads all logits once, then one program for each row finds from the summary the few
spans where its token can be and reads only those. An unfiltered row of 128k logits looks again at some dozens of spans
at most: a span can hold the token only if its largest logit with the noise of its smallest hash bits beats a token that
is there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.noise import gumbel, hash_columns, row_keys, screened_bits
from kernels.cuda.sampling_summary import (
    FOUND,
    NO_SUMS,
    SUMS_WHERE_FILTERED,
    TILE,
    each_of,
    list_spans,
    num_spans_of,
    read_spans,
    read_summary,
    row_filters,
    span_columns,
    summarise,
)
from kernels.cuda.sampling_threshold import filter_threshold
from kernels.noise import SAMPLE
from kernels.sampling import GREEDY_TEMPERATURE

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_TILE = tl.constexpr(TILE)
_SPANS_IN_TILE = tl.constexpr(32)
_SPANS_AT_ONCE = tl.constexpr(32)
_NOISE_SLACK = tl.constexpr(1e-4)
"""More than rounding can make of the noise of a span's smallest bits."""
_NO_COLUMN = tl.constexpr(0x7FFFFFFF)
_ADVANCED_AT_ONCE = 128


def argmax_rows(logits: Tensor) -> Tensor:
    """`kernels.sampling.argmax_rows`; the rows must be dense, and may have any stride."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        num_spans = num_spans_of(vocab)
        scratch = summarise(logits, num_spans)
        block = triton.next_power_of_2(num_spans)
        kernel: Any = take_largest[(rows,)]
        kernel(logits, logits.stride(0), vocab, num_spans, scratch, num_spans, tokens, BLOCK=block)
    return tokens


def advance(last_token: Tensor, rows: Tensor, drawn: Tensor) -> None:
    """`kernels.sampling.advance`; all three dense."""
    num = len(rows)
    if num:
        grid = (triton.cdiv(num, _ADVANCED_AT_ONCE),)
        kernel: Any = advance_rows[grid]
        kernel(last_token, rows, drawn, num, BLOCK=_ADVANCED_AT_ONCE, num_warps=1)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    needs_filter: bool,
    all_greedy: bool,
    purpose: int = SAMPLE,
) -> Tensor:
    """`kernels.sampling.sample`; the rows must be dense, and may have any stride, and so must be all vectors.

    The noise may differ from the reference's in its last bit, and the sums for top-p in their rounding.
    """
    if all_greedy:
        return argmax_rows(logits)
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        num_spans = num_spans_of(vocab)
        words = 3 * num_spans + (FOUND if needs_filter else 0)
        sums = SUMS_WHERE_FILTERED if needs_filter else NO_SUMS
        parameters = (temperature, top_k, top_p, min_p, seeds, positions)
        scratch = summarise(logits, words, parameters, purpose=purpose, noise=True, sums=sums)
        kernel: Any = draw_rows[(rows,)]
        kernel(
            logits,
            logits.stride(0),
            vocab,
            num_spans,
            scratch,
            words,
            *parameters,
            tokens,
            PURPOSE=purpose,
            FILTER=needs_filter,
            EACH=each_of(logits),
            BLOCK=triton.next_power_of_2(num_spans),
            num_warps=8,
            # So that two programs fit on a multiprocessor and all of 256 rows run at once.
            maxnreg=128,
        )
    return tokens


@triton.jit
def advance_rows(last_token, rows, drawn, num, BLOCK: tl.constexpr):
    """One program: BLOCK of the rows."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < num, other=0)
    token = tl.load(drawn + index, mask=index < num, other=0)
    tl.store(last_token + row, tl.maximum(token, 0).to(tl.int64), mask=index < num)


@triton.jit
def take_largest(logits, stride, vocab, num_spans, scratch, words, drawn, BLOCK: tl.constexpr):
    """One program: the argmax of one row."""
    row = tl.program_id(0).to(tl.int64)
    spans = tl.arange(0, BLOCK)
    largest = tl.load(scratch + row * words + spans, mask=spans < num_spans, other=-float("inf"))
    token = tl.full([], -1, tl.int32)
    if tl.max((largest != largest).to(tl.int32), axis=0) == 0:
        token = _first_of_largest(logits + row * stride, vocab, largest, spans)
    tl.store(drawn + row, token)


@triton.jit
def _first_of_largest(logits, vocab, largest, spans):
    """Lowest column of a row's largest logit, from the largest of each span; none is NaN."""
    peak = tl.max(largest, axis=0)
    # Tiles follow one another, spans of a tile do not.
    tile = tl.min(tl.where(largest == peak, spans, _NO_COLUMN), axis=0) // _SPANS_IN_TILE
    columns = tile * _TILE + tl.arange(0, _TILE)
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where((x == peak) & (columns < vocab), columns, _NO_COLUMN), axis=0)


@triton.jit
def draw_rows(
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
    seeds,
    positions,
    drawn,
    PURPOSE: tl.constexpr,
    FILTER: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the token of one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scratch += row * words
    ids = scratch + 2 * num_spans
    heat = tl.load(temperature + row)
    greedy = heat < _GREEDY
    scaled, seconds, spans, _ = read_summary(scratch, num_spans, tl.where(greedy, 1.0, heat), BLOCK)
    failed = scaled != scaled
    if FILTER:
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        filters = row_filters(vocab, k, p, m) & (heat >= _GREEDY)
        failed = failed | (filters & (seconds != seconds))
    token = tl.full([], -1, tl.int32)
    if tl.max(failed.to(tl.int32), axis=0) == 0:
        if greedy:
            token = _first_of_largest(logits, vocab, scaled, spans)
        else:
            key_a, key_b = row_keys(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            threshold = tl.full([], -float("inf"), tl.float32)
            if FILTER:
                if filters:
                    threshold = filter_threshold(logits, vocab, heat, scratch, num_spans, k, p, m, EACH, BLOCK)
                    scaled, seconds, spans, _ = read_summary(scratch, num_spans, heat, BLOCK)
                    bounds, bound = scaled, threshold
                else:
                    bounds, bound = _bounds(logits, vocab, heat, scaled, seconds, spans, key_a, key_b, EACH, BLOCK)
            else:
                bounds, bound = _bounds(logits, vocab, heat, scaled, seconds, spans, key_a, key_b, EACH, BLOCK)
            listed = list_spans((bounds >= bound) & (scaled > -float("inf")), spans, ids)
            token = _best_of_list(logits, vocab, heat, ids, listed, threshold, key_a, key_b, EACH)
    tl.store(drawn + row, token)


@triton.jit
def _bounds(logits, vocab, temperature, scaled, seconds, spans, key_a, key_b, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Upper bounds of each span's largest perturbed logit, and a perturbed logit that exists."""
    bounds = scaled + gumbel(screened_bits(seconds.to(tl.uint32, bitcast=True))) + _NOISE_SLACK
    best = tl.min(tl.where(bounds == tl.max(bounds, axis=0), spans, BLOCK), axis=0)
    columns = span_columns(best, EACH)
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    perturbed = tl.div_rn(x, temperature) + gumbel(hash_columns(columns, key_a, key_b))
    return bounds, tl.max(perturbed, axis=0)


@triton.jit
def _best_of_list(logits, vocab, temperature, ids, listed, threshold, key_a, key_b, EACH: tl.constexpr):
    """Column of the largest perturbed logit among the listed spans' that reach the threshold (ties: the lowest)."""
    best = tl.full([_SPANS_AT_ONCE, 64], -float("inf"), tl.float32)
    place = tl.zeros([_SPANS_AT_ONCE, 64], tl.int32)
    for begin in range(0, listed, _SPANS_AT_ONCE):
        x, columns, valid = read_spans(logits, vocab, temperature, ids, begin, listed, _SPANS_AT_ONCE, EACH)
        x = tl.where(valid & (x >= threshold), x, -float("inf")) + gumbel(hash_columns(columns, key_a, key_b))
        better = (x > best) | ((x == best) & (columns < place))
        best = tl.where(better, x, best)
        place = tl.where(better, columns, place)
    top = tl.max(tl.max(best, axis=1), axis=0)
    return tl.min(tl.min(tl.where(best == top, place, _NO_COLUMN), axis=1), axis=0)
