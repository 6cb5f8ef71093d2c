"""First pass over all logits: two words for each span of 64 tokens; of rows that draw, the best token of each chunk.

A *tile* is 2048 consecutive tokens, a *span* 64 of them: span g of a tile has its tokens at `offset + g * EACH`,
EACH tokens (16 bytes) side by side and then again every 32 * EACH. So a thread of the warp that reads a tile holds one
whole span, and nothing has to be exchanged between threads. Spans are numbered through the row, tile by tile. A *chunk*
is the tiles, or the part of a tile, of one program.

Scratch memory, float32 `[rows, words]`, one row for each row of logits:

    [spans]  the span's largest logit, as it is (not over the temperature), NaN where it has a NaN;
             of rows that draw without filters: the largest perturbed logit of each chunk, NaN where it has a NaN
    [spans]  where sums are needed: sum of exp(logit - largest) over the temperature;
             of rows that draw without filters: bits of the column of each chunk's largest
    [...]    what the next kernels add (sampling_candidates.py)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.noise import perturb, perturb_scale, row_keys, step_columns, unstep_columns
from kernels.cuda.pdl import is_wanted
from kernels.sampling import GREEDY_TEMPERATURE

TILE = 2048
SPANS_IN_TILE = 32
SPAN = 64

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_SPAN = tl.constexpr(SPAN)
_GROUP = tl.constexpr(SPANS_IN_TILE)
_TILE = tl.constexpr(TILE)
_DRAWN_AT_ONCE = tl.constexpr(256)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)

NO_SUMS = 0
SUMS_FOR_TOP_P = 1
SUMS = 2

MOST_REGISTERS = 80
"""Of a summary with sums."""
LEAST_REGISTERS = 64

# Programs of one warp, 32 to a multiprocessor, for 132 of them: the least that fills a large GPU. What computes much
# cannot have as many at once, and is to be in pieces small enough that all multiprocessors end together.
_PROGRAMS = 4224
_SMALL_PROGRAMS = 4 * _PROGRAMS
# Two warps to each scheduler: noise is then waited for, not computed, and takes longer than to start more programs.
_FEW_PROGRAMS = 1056
_PARTS_OF_TILE = 4


def each_of(logits: Tensor) -> int:
    """How many tokens lie side by side in a span: 16 bytes of them."""
    return 16 // logits.element_size()


def num_spans_of(vocab: int) -> int:
    """Spans of a row, whole tiles of them."""
    return triton.cdiv(vocab, TILE) * SPANS_IN_TILE


def num_chunks_of(rows: int, vocab: int, *, computes: bool = True) -> tuple[int, int, int]:
    """Chunks of each row, tiles of each chunk, and in how many parts, chunks too, few rows that draw take a tile.

    computes: more is done than to find the largest.
    """
    tiles = triton.cdiv(vocab, TILE)
    if computes and rows * tiles * _PARTS_OF_TILE <= _FEW_PROGRAMS:
        return tiles, 1, _PARTS_OF_TILE
    tiles_each = min(8, triton.cdiv(rows * tiles, _SMALL_PROGRAMS if computes else _PROGRAMS))
    return triton.cdiv(tiles, tiles_each), tiles_each, 1


def summarise(
    logits: Tensor,
    words: int,
    parameters: tuple[Tensor | None, ...] = (None,) * 6,
    *,
    purpose: int = 0,
    draws: bool = False,
    filters: bool = False,
    sums: int = NO_SUMS,
) -> Tensor:
    """Scratch memory, float32 `[rows, words]`, with its first two parts filled as far as the rows need them.

    logits: `[rows, vocab]`, dense within a row; parameters: temperature, top_k, top_p, min_p, seeds, positions as in
    `kernels.sampling.sample`; draws: rows that are neither greedy nor filtered draw; filters: rows may be filtered;
    sums: which rows get sums, NO_SUMS (none), SUMS_FOR_TOP_P (those with top-p and no top-k) or SUMS (all, at
    temperature 1).
    """
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert all(vector is None or vector.is_contiguous() for vector in parameters)
    rows, vocab = logits.shape
    scratch = torch.empty((rows, words), dtype=torch.float32, device=logits.device)
    chunks, tiles_each, parts = num_chunks_of(rows, vocab, computes=draws or filters or sums != NO_SUMS)
    parts = parts if draws else 1
    pdl = is_wanted(logits)
    kernel: Any = summarise_tiles[(rows * chunks * parts,)]
    kernel(
        logits,
        logits.stride(0),
        vocab,
        triton.cdiv(vocab, TILE),
        tiles_each,
        scratch,
        words,
        *parameters,
        PURPOSE=purpose,
        DRAW=draws,
        FILTER=filters,
        SUM=sums,
        PARTS=parts,
        EACH=each_of(logits),
        INSTRUCTION=logits.is_cuda,
        PDL=pdl,
        num_warps=1,
        # Enough programs at once to keep the memory busy.
        maxnreg=MOST_REGISTERS if sums else LEAST_REGISTERS,
        launch_pdl=pdl,
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
    DRAW: tl.constexpr,
    FILTER: tl.constexpr,
    SUM: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a chunk of one row."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    chunks = tl.cdiv(num_tiles, tiles_each) * PARTS
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    part = chunk % PARTS
    first = chunk // PARTS * tiles_each
    last = tl.minimum(first + tiles_each, num_tiles)
    logits += row * stride
    scratch += row * words
    heat = 1.0
    draws = False
    sums = SUM == 2
    if DRAW or FILTER:
        heat = tl.load(temperature + row)
        draws = heat >= _GREEDY
        if FILTER:
            k, p = tl.load(top_k + row), tl.load(top_p + row)
            if SUM == 1:
                sums = draws & (p < 1.0) & ((k < 1) | (k >= vocab))
            draws = draws & (row_filters(vocab, k, p, tl.load(min_p + row)) == 0)
    if DRAW:
        if draws:
            key_a, key_b = row_keys(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            begin = first * _TILE + part * (_TILE // PARTS)
            end = tl.minimum(tl.minimum(last * _TILE, begin + tiles_each * (_TILE // PARTS)), vocab)
            best, column = _draw_columns(logits, begin, end, heat, key_a, key_b, INSTRUCTION)
            tl.store(scratch + chunk, best)
            tl.store(scratch + num_tiles * _GROUP + chunk, column.to(tl.float32, bitcast=True))
        elif part == 0:
            _summarise_spans(logits, vocab, first, last, num_tiles, scratch, sums, heat, SUM, EACH)
    else:
        _summarise_spans(logits, vocab, first, last, num_tiles, scratch, sums, heat, SUM, EACH)


@triton.jit
def _draw_columns(logits, begin, end, temperature, key_a, key_b, INSTRUCTION: tl.constexpr):
    """The largest perturbed logit of some consecutive columns, and its column."""
    index = tl.arange(0, _DRAWN_AT_ONCE)
    scale = perturb_scale(temperature)
    best = tl.full([_DRAWN_AT_ONCE], -float("inf"), tl.float32)
    # Of column 0, which it stays where all are -inf. The column is found again from where its hash started.
    place = tl.zeros([_DRAWN_AT_ONCE], tl.uint32) + key_a
    x = tl.load(logits + begin + index, mask=begin + index < end, other=-float("inf"))
    while begin < end:
        ahead = begin + _DRAWN_AT_ONCE + index
        following = tl.load(logits + ahead, mask=ahead < end, other=-float("inf"))
        stepped = step_columns(begin + index, key_a)
        perturbed = perturb(x.to(tl.float32), scale, stepped, key_b, INSTRUCTION)
        place = tl.where(perturbed > best, stepped, place)
        best = tl.maximum(best, perturbed, propagate_nan=tl.PropagateNan.ALL)
        x = following
        begin += _DRAWN_AT_ONCE
    return first_best(best, unstep_columns(place, key_a))


@triton.jit
def order_key(value):
    """An int32 that is ordered as the float32 is."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of_key(key):
    """The float32 of an `order_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def rank_key(value, column):
    """An int64 that is larger the larger the float32 value, then the lower the column; that of a NaN above all.

    Both zeros are the same value.
    """
    key = tl.where(value != value, _LARGEST_KEY, order_key(value + 0.0))
    return (key.to(tl.int64) << 32) | (column ^ _LARGEST_KEY).to(tl.int64)


@triton.jit
def ranked(key):
    """Value and column of a `rank_key`."""
    return value_of_key((key >> 32).to(tl.int32)), (key & 0xFFFFFFFF).to(tl.int32) ^ _LARGEST_KEY


@triton.jit
def first_best(values, columns):
    """The largest of some values, NaN if one is, and the lowest column it has."""
    return ranked(tl.max(rank_key(values, columns), axis=0))


@triton.jit
def largest_or_nan(values):
    """The largest of some values, NaN if one is."""
    return value_of_key(tl.max(tl.where(values != values, _LARGEST_KEY, order_key(values)), axis=0))


@triton.jit
def first_of_largest(logits, vocab, largest, spans, peak):
    """Lowest column of a row's largest logit, `peak`, from the largest of each span."""
    # Tiles follow one another, spans of a tile do not.
    tile = tl.min(tl.where(largest == peak, spans, _LARGEST_KEY), axis=0) // _GROUP
    columns = tile * _TILE + tl.arange(0, _TILE)
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    return tl.min(tl.where((x == peak) & (columns < vocab), columns, _LARGEST_KEY), axis=0)


@triton.jit
def span_start(span, EACH: tl.constexpr):
    """The first column of a span."""
    return (span // _GROUP) * _TILE + (span % _GROUP) * EACH


@triton.jit
def tile_columns(tile, EACH: tl.constexpr):
    """Columns of a tile, `[SPAN / EACH, spans, EACH]`: a thread of one warp has a span."""
    inner = tl.arange(0, _GROUP)[None, :, None] * EACH + tl.arange(0, EACH)[None, None, :]
    return tile * _TILE + tl.arange(0, _SPAN // EACH)[:, None, None] * (_GROUP * EACH) + inner


@triton.jit
def _summarise_spans(
    logits, vocab, first, last, num_tiles, scratch, sums, temperature, SUM: tl.constexpr, EACH: tl.constexpr
):
    spans = tl.arange(0, _GROUP)
    for tile in range(first, last):
        if SUM == 2:
            largest, total = _sum_spans(logits, vocab, tile, _LOG2_E, EACH)
            tl.store(scratch + (num_tiles + tile) * _GROUP + spans, total)
        elif SUM == 1:
            if sums:
                largest, total = _sum_spans(logits, vocab, tile, _LOG2_E / temperature, EACH)
                tl.store(scratch + (num_tiles + tile) * _GROUP + spans, total)
            else:
                largest = _largest_of_spans(logits, vocab, tile, EACH)
        else:
            largest = _largest_of_spans(logits, vocab, tile, EACH)
        tl.store(scratch + tile * _GROUP + spans, largest)


@triton.jit
def _largest_of_spans(logits, vocab, tile, EACH: tl.constexpr):
    inner = tl.arange(0, _GROUP)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    largest = tl.full([_GROUP, EACH], -float("inf"), tl.float32)
    for part in tl.static_range(_SPAN // EACH):
        columns = tile * _TILE + part * (_GROUP * EACH) + inner
        x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
    failed = largest != largest
    top = tl.max(tl.where(failed, -float("inf"), largest), axis=1)
    return tl.where(tl.max(failed.to(tl.int32), axis=1) > 0, float("nan"), top)


@triton.jit
def _sum_spans(logits, vocab, tile, per_logit, EACH: tl.constexpr):
    columns = tile_columns(tile, EACH)
    x = tl.load(logits + columns, mask=columns < vocab, other=-float("inf")).to(tl.float32)
    largest = tl.max(tl.max(x, axis=2), axis=0)
    # An infinite reference would make NaN, which must mean a NaN.
    reference = tl.minimum(tl.maximum(largest, -_LARGEST), _LARGEST)
    weights = tl.exp2((x - reference[None, :, None]) * per_logit)
    total = tl.sum(tl.sum(weights, axis=2), axis=0)
    return tl.where(total != total, float("nan"), largest), total
