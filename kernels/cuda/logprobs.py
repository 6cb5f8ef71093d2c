"""Log probabilities of tokens and of the most likely ones; kernels/logprobs.py says which.

The same two launches as a draw: a summary of all logits, then one program for each row that reads only the spans in
which something large can be.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import logprobs
from kernels.cuda.sampling_summary import (
    FOUND,
    SUMS,
    SUMS_WHERE_FILTERED,
    TILE,
    each_of,
    list_spans,
    num_spans_of,
    read_spans,
    read_summary,
    row_filters,
    summarise,
)
from kernels.cuda.sampling_threshold import NOTHING_BELOW, filter_threshold, smallest_passing
from kernels.sampling import GREEDY_TEMPERATURE

_WIDEST = 128
_RANKED = tl.constexpr(2 * _WIDEST)
_RANKED_AT_ONCE = tl.constexpr(16)
_IDS_AT = tl.constexpr(FOUND // 2)
"""Where in the last part of the scratch memory the columns lie; the logits lie at its beginning."""
_SPANS_AT_ONCE = tl.constexpr(32)
_SPANS_IN_TILE = tl.constexpr(32)
_TILE = tl.constexpr(TILE)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_PROCESSED_AT_ONCE = 4096


def score_tokens(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprobs.score_tokens`; the rows must be dense, and may have any stride; tokens dense.

    The ids beside a row that holds a NaN are the first ones. Widths above 128 are sorted by torch.
    """
    if width > _WIDEST:
        return logprobs.score_tokens(logits, tokens, width)
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, width), dtype=torch.int64, device=logits.device)
    tops = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if rows:
        assert tokens.is_contiguous()
        num_spans = num_spans_of(vocab)
        words = 3 * num_spans + FOUND
        scratch = summarise(logits, words, sums=SUMS)
        kernel: Any = score_rows[(rows,)]
        kernel(
            logits,
            logits.stride(0),
            vocab,
            num_spans,
            scratch,
            words,
            tokens,
            chosen,
            ids,
            tops,
            width,
            LISTS=width > 0,
            EACH=each_of(logits),
            BLOCK=triton.next_power_of_2(num_spans),
            num_warps=8,
            maxnreg=128,
        )
    return chosen, ids, tops


def processed_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, needs_filter: bool
) -> Tensor:
    """`kernels.logprobs.processed_logits`; the rows must be dense, and may have any stride; the vectors dense."""
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    rows, vocab = logits.shape
    processed = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    if not rows:
        return processed
    thresholds = None
    if needs_filter:
        num_spans = num_spans_of(vocab)
        words = 3 * num_spans + FOUND
        filters = (temperature, top_k, top_p, min_p)
        scratch = summarise(logits, words, (*filters, None, None), sums=SUMS_WHERE_FILTERED)
        thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
        find: Any = find_thresholds[(rows,)]
        find(
            logits,
            logits.stride(0),
            vocab,
            num_spans,
            scratch,
            words,
            *filters,
            thresholds,
            EACH=each_of(logits),
            BLOCK=triton.next_power_of_2(num_spans),
            num_warps=8,
            maxnreg=128,
        )
    blocks = triton.cdiv(vocab, _PROCESSED_AT_ONCE)
    kernel: Any = process_logits[(rows * blocks,)]
    kernel(logits, logits.stride(0), vocab, temperature, thresholds, processed, BLOCK=_PROCESSED_AT_ONCE, num_warps=8)
    return processed


@triton.jit
def find_thresholds(
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
    thresholds,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the threshold of one row, -inf where nothing is filtered out."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scratch += row * words
    heat = tl.load(temperature + row)
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.full([], -float("inf"), tl.float32)
    if (heat >= _GREEDY) & row_filters(vocab, k, p, m):
        scaled, sums, _, _ = read_summary(scratch, num_spans, heat, BLOCK)
        failed = (scaled != scaled) | (sums != sums)
        # With an infinite logit the reference's threshold for min_p = 0 is inf - inf, and lets everything through.
        unbounded = (tl.max(scaled, axis=0) == float("inf")) & (m == 0.0)
        if (tl.max(failed.to(tl.int32), axis=0) == 0) & (unbounded == 0):
            threshold = filter_threshold(logits, vocab, heat, scratch, num_spans, k, p, m, EACH, BLOCK)
    tl.store(thresholds + row, threshold)


@triton.jit
def process_logits(logits, stride, vocab, temperature, thresholds, processed, BLOCK: tl.constexpr):
    """One program: BLOCK tokens of one row over temperature, -inf below the threshold."""
    blocks = tl.cdiv(vocab, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    heat = tl.load(temperature + row)
    x = tl.load(logits + row * stride + columns, mask=columns < vocab, other=0.0).to(tl.float32)
    x = tl.div_rn(x, tl.where(heat < _GREEDY, 1.0, heat))
    if thresholds is not None:
        x = tl.where(x < tl.load(thresholds + row), -float("inf"), x)
    tl.store(processed + row * vocab + columns, x, mask=columns < vocab)


@triton.jit
def score_rows(
    logits,
    stride,
    vocab,
    num_spans,
    scratch,
    words,
    tokens,
    chosen,
    ids,
    tops,
    width,
    LISTS: tl.constexpr,
    EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: the logprob of one row's token, and the row's `width` largest with theirs if LISTS."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scratch += row * words
    largest, sums, _, _ = read_summary(scratch, num_spans, 1.0, BLOCK)
    failed = tl.max((sums != sums).to(tl.int32), axis=0) > 0
    peak = tl.max(largest, axis=0)
    # Infinite in either direction: x - peak is a NaN somewhere, and so is every logprob, as in torch.
    finite = (peak > -float("inf")) & (peak < float("inf")) & (failed == 0)
    total = tl.sum(tl.exp2((largest - peak) * _LOG2_E) * sums, axis=0)
    log_total = tl.where(finite, tl.log(tl.where(finite, total, 1.0)), float("nan"))
    x = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, (x - peak) - log_total)
    if LISTS:
        ids += row * width
        tops += row * width
        if failed:
            places = tl.arange(0, _RANKED)
            tl.store(ids + places, places.to(tl.int64), mask=places < width)
            tl.store(tops + places, tl.full([_RANKED], float("nan"), tl.float32), mask=places < width)
        else:
            least = peak
            if peak > -float("inf"):
                least = tl.full([], -float("inf"), tl.float32)
                if width < vocab:
                    low = tl.full([], NOTHING_BELOW, tl.int32)
                    limit = tl.full([], 0.0, tl.float32) + width
                    least, _listed = smallest_passing(
                        logits, vocab, 1.0, scratch, num_spans, peak, False, limit, low, EACH, BLOCK
                    )
            found = scratch + 3 * num_spans
            num = _find_largest(logits, vocab, scratch, num_spans, found, least, width, EACH, BLOCK)
            _store_in_order(found, num, width, peak, log_total, ids, tops)


@triton.jit
def _find_largest(logits, vocab, scratch, num_spans, found, least, width, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the logits from `least` on and their columns to `found`: all if they fit, else those that are ordered first.

    Fewer than `width` are larger than `least`, but any number may be equal to it. Returns how many were copied.
    """
    largest, _, spans, inside = read_summary(scratch, num_spans, 1.0, BLOCK)
    listed = list_spans(inside & (largest >= least), spans, scratch + 2 * num_spans)
    num = _copy_from(logits, vocab, scratch + 2 * num_spans, listed, least, True, found, EACH)
    if num > _RANKED:
        num = _copy_from(logits, vocab, scratch + 2 * num_spans, listed, least, False, found, EACH)
        tile = tl.full([], 0, tl.int32)
        while (num < width) & (tile * _SPANS_IN_TILE < num_spans):
            in_tile = tl.load(scratch + tile * _SPANS_IN_TILE + tl.arange(0, _SPANS_IN_TILE))
            if tl.max(in_tile, axis=0) >= least:
                columns = tile * _TILE + tl.arange(0, _TILE)
                x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
                equal = ((x == least) & (columns < vocab)).to(tl.int32)
                place = num + tl.cumsum(equal, axis=0) - 1
                _store_found(found, place, x, columns, (equal > 0) & (place < width))
                num += tl.sum(equal, axis=0)
            tile += 1
        num = tl.minimum(num, width)
        tl.debug_barrier()
    return num


@triton.jit
def _copy_from(logits, vocab, ids, listed, least, inclusive, found, EACH: tl.constexpr):
    """Copy logits above `least`, or from it on, as far as there is room; returns how many there are."""
    tl.debug_barrier()
    num = tl.full([], 0, tl.int32)
    for begin in range(0, listed, _SPANS_AT_ONCE):
        x, columns, valid = read_spans(logits, vocab, 1.0, ids, begin, listed, _SPANS_AT_ONCE, EACH)
        taken = valid & ((x > least) | (inclusive & (x == least)))
        taken = tl.reshape(taken, [_SPANS_AT_ONCE * 64]).to(tl.int32)
        place = num + tl.cumsum(taken, axis=0) - 1
        x, columns = tl.reshape(x, [_SPANS_AT_ONCE * 64]), tl.reshape(columns, [_SPANS_AT_ONCE * 64])
        _store_found(found, place, x, columns, (taken > 0) & (place < _RANKED))
        num += tl.sum(taken, axis=0)
    tl.debug_barrier()
    return num


@triton.jit
def _store_found(found, place, x, columns, mask):
    tl.store(found + place, x, mask=mask)
    tl.store(found + _IDS_AT + place, columns.to(tl.float32, bitcast=True), mask=mask)


@triton.jit
def _store_in_order(found, num, width, peak, log_total, ids, tops):
    mine = tl.arange(0, _RANKED)
    x = tl.load(found + mine, mask=mine < num, other=0.0)
    column = tl.load(found + _IDS_AT + mine, mask=mine < num, other=0.0).to(tl.int32, bitcast=True)
    before = tl.zeros([_RANKED, _RANKED_AT_ONCE], tl.int32)
    for begin in range(0, num, _RANKED_AT_ONCE):
        index = begin + tl.arange(0, _RANKED_AT_ONCE)
        other = tl.load(found + index, mask=index < num, other=0.0)
        its_column = tl.load(found + _IDS_AT + index, mask=index < num, other=0.0).to(tl.int32, bitcast=True)
        first = (other[None, :] == x[:, None]) & (its_column[None, :] < column[:, None])
        first = first | (other[None, :] > x[:, None])
        before += (first & (index < num)[None, :]).to(tl.int32)
    place = tl.sum(before, axis=1)
    kept = (mine < num) & (place < width)
    tl.store(ids + place, column.to(tl.int64), mask=kept)
    tl.store(tops + place, (x - peak) - log_total, mask=kept)
