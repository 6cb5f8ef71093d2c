"""Log probabilities of tokens and of the most likely ones; kernels/logprobs.py says which.

The first pass over the logits (sampling_summary.py) gives the sums; the most likely tokens and what filters let through
are among the candidates of sampling_candidates.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import logprobs
from kernels.cuda.sampling_candidates import BOUND_WARPS, CAPACITY, MOST_REGISTERS, STATE, find_candidates
from kernels.cuda.sampling_summary import SUMS, largest_or_nan, num_spans_of, rank_key, ranked, row_filters, summarise
from kernels.cuda.sampling_threshold import row_threshold, unused_bits
from kernels.sampling import GREEDY_TEMPERATURE

_WIDEST = 128
_RANKED = tl.constexpr(2 * _WIDEST)
_RANKED_AT_ONCE = tl.constexpr(16)
_AT_ONCE = tl.constexpr(512)
_STATE = tl.constexpr(STATE)
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_ABOVE_ALL = tl.constexpr(2**63 - 1)
_PROCESSED_AT_ONCE = 4096


def score_tokens(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprobs.score_tokens`; the rows must be dense, and may have any stride; tokens dense.

    The ids beside a row that holds a NaN are the first ones. Widths above 128 are sorted by torch.
    """
    return score_among(logits, tokens, width, capacity=CAPACITY)


def score_among(logits: Tensor, tokens: Tensor, width: int, *, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`score_tokens`; capacity: how many candidates of a row are kept."""
    if width > _WIDEST:
        return logprobs.score_tokens(logits, tokens, width)
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ids = torch.empty((rows, width), dtype=torch.int64, device=logits.device)
    tops = torch.empty((rows, width), dtype=torch.float32, device=logits.device)
    if not rows:
        return chosen, ids, tops
    assert tokens.is_contiguous()
    num_spans = num_spans_of(vocab)
    if width:
        found = find_candidates(logits, (None,) * 6, width=width, capacity=capacity)
        kernel: Any = list_largest[(rows,)]
        kernel(
            logits,
            logits.stride(0),
            vocab,
            num_spans,
            found.scratch,
            found.words,
            found.capacity,
            tokens,
            chosen,
            ids,
            tops,
            width,
            num_warps=4,
            maxnreg=MOST_REGISTERS,
        )
    else:
        scratch = summarise(logits, 2 * num_spans, sums=SUMS)
        score: Any = score_rows[(rows,)]
        score(
            logits,
            logits.stride(0),
            num_spans,
            scratch,
            2 * num_spans,
            tokens,
            chosen,
            BLOCK=triton.next_power_of_2(num_spans),
            # As many as sum up the row where others want the most likely tokens too: the same order, so the same bits.
            num_warps=BOUND_WARPS,
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
        filters = (temperature, top_k, top_p, min_p)
        found = find_candidates(logits, (*filters, None, None))
        thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
        find: Any = find_thresholds[(rows,)]
        find(
            logits,
            logits.stride(0),
            vocab,
            found.num_spans,
            found.scratch,
            found.words,
            found.capacity,
            *filters,
            thresholds,
            UNUSED=unused_bits(logits.dtype),
            num_warps=8,
            maxnreg=MOST_REGISTERS,
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
    capacity,
    temperature,
    top_k,
    top_p,
    min_p,
    thresholds,
    UNUSED: tl.constexpr,
):
    """One program: the threshold of one row, -inf where nothing is filtered out."""
    row = tl.program_id(0).to(tl.int64)
    state = scratch + row * words + 2 * num_spans
    heat = tl.load(temperature + row)
    k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
    threshold = tl.full([], -float("inf"), tl.float32)
    if (heat >= _GREEDY) & row_filters(vocab, k, p, m):
        peak = tl.load(state + 1)
        if (peak > -float("inf")) & (peak < float("inf")):
            threshold, _ = row_threshold(logits + row * stride, vocab, state, capacity, heat, k, p, m, UNUSED)
        # With an infinite logit the reference's threshold for min_p = 0 is inf - inf, and lets everything through.
        elif (peak == float("inf")) & (m != 0.0):
            threshold = peak
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
def score_rows(logits, stride, num_spans, scratch, words, tokens, chosen, BLOCK: tl.constexpr):
    """One program: the logprob of one row's token."""
    row = tl.program_id(0).to(tl.int64)
    scratch += row * words
    spans = tl.arange(0, BLOCK)
    largest = tl.load(scratch + spans, mask=spans < num_spans, other=-float("inf"))
    sums = tl.load(scratch + num_spans + spans, mask=spans < num_spans, other=0.0)
    peak = largest_or_nan(largest)
    log_total = _log_total(peak, tl.sum(tl.exp2((largest - peak) * _LOG2_E) * sums, axis=0))
    x = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, (x - peak) - log_total)


@triton.jit
def _log_total(peak, total):
    # Infinite in either direction: x - peak is a NaN somewhere, and so is every logprob, as in torch.
    finite = (peak > -float("inf")) & (peak < float("inf"))
    return tl.where(finite, tl.log(tl.where(finite, total, 1.0)), float("nan"))


@triton.jit
def list_largest(logits, stride, vocab, num_spans, scratch, words, capacity, tokens, chosen, ids, tops, width):
    """One program: the logprob of one row's token, and the row's `width` largest with theirs."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    state = scratch + row * words + 2 * num_spans
    ids += row * width
    tops += row * width
    peak = tl.load(state + 1)
    log_total = _log_total(peak, tl.load(state + 2))
    x = tl.load(logits + tl.load(tokens + row)).to(tl.float32)
    tl.store(chosen + row, (x - peak) - log_total)
    num = tl.load(state + 3).to(tl.int32, bitcast=True)
    values = state + _STATE
    columns = (values + capacity).to(tl.pointer_type(tl.int32))
    if peak != peak:
        places = tl.arange(0, _RANKED)
        tl.store(ids + places, places.to(tl.int64), mask=places < width)
        tl.store(tops + places, tl.full([_RANKED], float("nan"), tl.float32), mask=places < width)
    elif (num < width) | (num > capacity):
        _store_one_by_one(logits, None, vocab, width, peak, log_total, ids, tops)
    elif num > _RANKED:
        _store_one_by_one(values, columns, num, width, peak, log_total, ids, tops)
    else:
        _store_ranked(values, columns, num, width, peak, log_total, ids, tops)


@triton.jit
def _keys(values, columns, index, num):
    """A `rank_key` of each of the values at the indices, below all others where there is none."""
    inside = index < num
    x = tl.load(values + index, mask=inside, other=0.0).to(tl.float32)
    if columns is None:
        column = index
    else:
        column = tl.load(columns + index, mask=inside, other=0)
    return tl.where(inside, rank_key(x, column), -_ABOVE_ALL)


@triton.jit
def _store_ranked(values, columns, num, width, peak, log_total, ids, tops):
    """The place of each of up to _RANKED values is the number of those before it."""
    mine = _keys(values, columns, tl.arange(0, _RANKED), num)
    before = tl.zeros([_RANKED_AT_ONCE, _RANKED], tl.int32)
    for begin in range(0, num, _RANKED_AT_ONCE):
        others = _keys(values, columns, begin + tl.arange(0, _RANKED_AT_ONCE), num)
        before += (others[:, None] > mine[None, :]).to(tl.int32)
    place = tl.sum(before, axis=0)
    x, column = ranked(mine)
    kept = (tl.arange(0, _RANKED) < num) & (place < width)
    tl.store(ids + place, column.to(tl.int64), mask=kept)
    tl.store(tops + place, (x - peak) - log_total, mask=kept)


@triton.jit
def _store_one_by_one(values, columns, num, width, peak, log_total, ids, tops):
    """For each place once through the values; only where there are very many like the last of them."""
    last = tl.full([], _ABOVE_ALL, tl.int64)
    for place in range(width):
        best = tl.full([_AT_ONCE], -_ABOVE_ALL, tl.int64)
        for begin in range(0, num, _AT_ONCE):
            keys = _keys(values, columns, begin + tl.arange(0, _AT_ONCE), num)
            best = tl.maximum(best, tl.where(keys < last, keys, -_ABOVE_ALL))
        last = tl.max(best, axis=0)
        x, column = ranked(last)
        tl.store(ids + place, column.to(tl.int64))
        tl.store(tops + place, (x - peak) - log_total)
