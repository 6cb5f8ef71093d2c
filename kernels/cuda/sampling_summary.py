"""First pass of everything that looks for large logits: a few words for each span of 64 tokens.

A *tile* is 2048 consecutive tokens, a *span* 64 of them: span g of a tile has its tokens at `offset + g * EACH`,
EACH tokens (16 bytes) side by side and then again every 32 * EACH. So a thread of the warp that reads a tile holds one
whole span, and nothing has to be exchanged between threads. Spans are numbered through the row, tile by tile.

Scratch memory, float32 `[rows, words]`, one row for each row of logits:

    [spans]  the span's largest logit, as it is (not over the temperature); in rows without sums NaN where it has a NaN
    [spans]  rows that filter or are scored: sum of exp(logit - largest) over the temperature, NaN where it has a NaN
             rows that draw unfiltered: bits of the smallest of noise.screen_columns
    [spans]  bits of span numbers: for the second pass, spans to look at again
    [FOUND]  for the second pass, single logits
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.noise import row_keys, screen_columns, step_columns
from kernels.sampling import GREEDY_TEMPERATURE

TILE = 2048
FOUND = 2048
"""Capacity of the last part of a row's scratch memory."""

_SPANS_IN_TILE = 32
_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SPAN = tl.constexpr(64)
_GROUP = tl.constexpr(_SPANS_IN_TILE)
_TILE = tl.constexpr(TILE)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)

NO_SUMS = 0
SUMS_WHERE_FILTERED = 1
SUMS = 2

MOST_REGISTERS = 96
"""Of a summary with sums."""
LEAST_REGISTERS = 64

# Programs of one warp, 32 to a multiprocessor, for 132 of them: the least that fills a large GPU.
_PROGRAMS = 4224


def each_of(logits: Tensor) -> int:
    """How many tokens lie side by side in a span: 16 bytes of them."""
    return 16 // logits.element_size()


def num_spans_of(vocab: int) -> int:
    """Spans of a row, whole tiles of them."""
    return triton.cdiv(vocab, TILE) * _SPANS_IN_TILE


def summarise(
    logits: Tensor,
    words: int,
    parameters: tuple[Tensor | None, ...] = (None,) * 6,
    *,
    purpose: int = 0,
    noise: bool = False,
    sums: int = NO_SUMS,
) -> Tensor:
    """Scratch memory, float32 `[rows, words]`, with its first two parts filled as far as the rows need them.

    logits: `[rows, vocab]`, dense within a row; parameters: temperature, top_k, top_p, min_p, seeds, positions as in
    `kernels.sampling.sample`; noise: rows without filters draw; sums: which rows get sums, NO_SUMS (none),
    SUMS_WHERE_FILTERED or SUMS (all, at temperature 1).
    """
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert all(vector is None or vector.is_contiguous() for vector in parameters)
    rows, vocab = logits.shape
    scratch = torch.empty((rows, words), dtype=torch.float32, device=logits.device)
    tiles = triton.cdiv(vocab, TILE)
    tiles_each = min(8, triton.cdiv(rows * tiles, _PROGRAMS))
    grid = (rows * triton.cdiv(tiles, tiles_each),)
    kernel: Any = summarise_tiles[grid]
    kernel(
        logits,
        logits.stride(0),
        vocab,
        tiles,
        tiles_each,
        scratch,
        words,
        *parameters,
        PURPOSE=purpose,
        NOISE=noise,
        SUM=sums,
        EACH=each_of(logits),
        num_warps=1,
        # Enough programs at once to keep the memory busy.
        maxnreg=MOST_REGISTERS if sums else LEAST_REGISTERS,
    )
    return scratch


@triton.jit
def row_filters(vocab, top_k, top_p, min_p):
    """Whether any filter of a row is on, from its loaded parameters."""
    return ((top_k >= 1) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)


@triton.jit
def summarise_tiles(
    logits,
    stride,
    vocab,
    num_tiles,
    tiles_each,
    scratch,
    words,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    PURPOSE: tl.constexpr,
    NOISE: tl.constexpr,
    SUM: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program: some consecutive tiles of one row."""
    chunks = tl.cdiv(num_tiles, tiles_each)
    row = (tl.program_id(0) // chunks).to(tl.int64)
    first = (tl.program_id(0) % chunks) * tiles_each
    last = tl.minimum(first + tiles_each, num_tiles)
    logits += row * stride
    scratch += row * words
    seconds = scratch + num_tiles * _GROUP
    if SUM == 2:
        sums = True
        per_logit = _LOG2_E
    elif SUM == 1:
        heat = tl.load(temperature + row)
        filters = row_filters(vocab, tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row))
        sums = (heat >= _GREEDY) & filters
        per_logit = _LOG2_E / tl.where(sums, heat, 1.0)
    else:
        sums = False
        per_logit = _LOG2_E
    if NOISE:
        key_a, key_b = row_keys(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
    else:
        key_a, key_b = tl.full([], 0, tl.uint32), tl.full([], 0, tl.uint32)
    spans = tl.arange(0, _GROUP)
    for tile in range(first, last):
        if SUM == 2:
            largest, second = _sum_spans(logits, vocab, tile, per_logit, EACH)
            tl.store(seconds + tile * _GROUP + spans, second)
        elif SUM == 1:
            if sums:
                largest, second = _sum_spans(logits, vocab, tile, per_logit, EACH)
            else:
                largest, screen = _screen_spans(logits, vocab, tile, key_a, key_b, NOISE, EACH)
                second = screen.to(tl.float32, bitcast=True)
            tl.store(seconds + tile * _GROUP + spans, second)
        else:
            largest, screen = _screen_spans(logits, vocab, tile, key_a, key_b, NOISE, EACH)
            if NOISE:
                tl.store(seconds + tile * _GROUP + spans, screen.to(tl.float32, bitcast=True))
        tl.store(scratch + tile * _GROUP + spans, largest)


@triton.jit
def _screen_spans(logits, vocab, tile, key_a, key_b, NOISE: tl.constexpr, EACH: tl.constexpr):
    inner = tl.arange(0, _GROUP)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    largest = tl.full([_GROUP, EACH], -float("inf"), tl.float32)
    for part in tl.static_range(_SPAN // EACH):
        columns = tile * _TILE + part * (_GROUP * EACH) + inner
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    failed = largest != largest
    top = tl.max(tl.where(failed, -float("inf"), largest), axis=1)
    top = tl.where(tl.max(failed.to(tl.int32), axis=1) > 0, float("nan"), top)
    screen = tl.full([_GROUP], 0xFFFFFFFF, tl.uint32)
    if NOISE:
        # Token by token, so that each thread has the tokens of its own span here too.
        stepped = step_columns(tl.arange(0, _GROUP) * EACH + tile * _TILE, key_a)
        for token in tl.static_range(_SPAN):
            # EACH side by side, then again 32 * EACH further on.
            more = screen_columns(stepped, token % EACH + token // EACH * EACH * _GROUP, key_b)
            screen = tl.minimum(screen, more)
    return top, screen


@triton.jit
def _sum_spans(logits, vocab, tile, per_logit, EACH: tl.constexpr):
    inner = tl.arange(0, _GROUP)[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    columns = tile * _TILE + tl.arange(0, _SPAN // EACH)[:, None, None] * (_GROUP * EACH) + inner
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    largest = tl.max(tl.max(x, axis=2), axis=0)
    # An infinite reference would make NaN, which must mean a NaN.
    reference = tl.minimum(tl.maximum(largest, -_LARGEST), _LARGEST)
    weights = tl.exp2((x - reference[None, :, None]) * per_logit)
    return largest, tl.sum(tl.sum(weights, axis=2), axis=0)


@triton.jit
def read_summary(scratch, num_spans, temperature, BLOCK: tl.constexpr):
    """Of each span of a row: its largest logit over temperature, its second word, its number, whether there is one.

    Where there is none, the first is -inf and the second 0.
    """
    spans = tl.arange(0, BLOCK)
    inside = spans < num_spans
    largest = tl.load(scratch + spans, mask=inside, other=-float("inf"))
    seconds = tl.load(scratch + num_spans + spans, mask=inside, other=0.0)
    return tl.div_rn(largest, temperature), seconds, spans, inside


@triton.jit
def list_spans(wanted, spans, ids):
    """Write the numbers of the wanted spans in order; returns how many. For the program's own reading only."""
    place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.debug_barrier()
    tl.store(ids + place, spans.to(tl.float32, bitcast=True), mask=wanted)
    tl.debug_barrier()
    return tl.sum(wanted.to(tl.int32), axis=0)


@triton.jit
def read_spans(logits, vocab, temperature, ids, begin, count, SPANS: tl.constexpr, EACH: tl.constexpr):
    """Tokens of the listed spans from `begin` on: logits over temperature, columns and validity, `[SPANS, 64]`."""
    index = begin + tl.arange(0, SPANS)
    span = tl.load(ids + index, mask=index < count, other=0.0).to(tl.int32, bitcast=True)
    columns = _span_start(span, EACH)[:, None] + _span_offsets(EACH)[None, :]
    valid = (index < count)[:, None] & (columns < vocab)
    x = tl.load(logits + columns, mask=valid, other=-float("inf")).to(tl.float32)
    return tl.div_rn(x, temperature), columns, valid


@triton.jit
def span_columns(span, EACH: tl.constexpr):
    """Columns of one span, `[64]`."""
    return _span_start(span, EACH) + _span_offsets(EACH)


@triton.jit
def _span_start(span, EACH: tl.constexpr):
    return (span // _GROUP) * _TILE + (span % _GROUP) * EACH


@triton.jit
def _span_offsets(EACH: tl.constexpr):
    inner = tl.arange(0, _SPAN)
    return (inner // EACH) * (_GROUP * EACH) + inner % EACH
