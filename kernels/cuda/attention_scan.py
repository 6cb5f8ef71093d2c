"""The inner loop of paged attention in Triton: tiles of a row's keys, with a running softmax.

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _pages_of(table, start, end, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of a tile's keys: one if the tile lies within a page, else one for each key."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.load(table + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        keys = start + tl.arange(0, BLOCK_N)
        return tl.load(table + keys // PAGE_SIZE, mask=keys < end, other=0)


@triton.jit
def _converted(stored, dtype: tl.constexpr):
    """What pages hold, as queries are; float16 holds 8-bit floats exactly, and getting there takes one instruction."""
    if stored.dtype.primitive_bitwidth == 8:
        return stored.to(tl.float16).to(dtype)
    else:
        return stored.to(dtype)


@triton.jit
def scan_keys(
    acc,
    top,
    total,
    queries,
    keys_base,
    table,
    page_stride,
    half_stride,
    token_stride,
    low,
    high,
    first_tile,
    gap_at,
    gap,
    num_tiles,
    position,
    before,
    own_len,
    visible,
    seen_rows,
    lane_valid,
    score_scale,
    cap,
    window,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take num_tiles tiles of keys into the running (acc, top, total).

    They are first_tile and those after it, less `gap` tiles from the gap_at-th on. MASKED: keys outside `[low, high)`
    are not read, and masks decide who sees which; else every lane sees every key.
    """
    dims = tl.arange(0, WIDTH)
    next_start = (first_tile + tl.where(gap_at > 0, 0, gap)) * BLOCK_N
    # Ids are fetched a tile ahead, so that a tile's addresses wait for nothing.
    next_pages = _pages_of(table, next_start, high, PAGE_SIZE, BLOCK_N)
    for i in tl.range(0, num_tiles):
        start = next_start
        pages = next_pages
        next_start = (first_tile + i + 1 + tl.where(i + 1 < gap_at, 0, gap)) * BLOCK_N
        next_pages = _pages_of(table, next_start, high, PAGE_SIZE, BLOCK_N)
        keys = start + tl.arange(0, BLOCK_N)
        if PAGE_SIZE % BLOCK_N == 0:
            in_page = start % PAGE_SIZE + tl.arange(0, BLOCK_N)
        else:
            in_page = keys % PAGE_SIZE
        places = pages.to(tl.int64) * page_stride + in_page * token_stride
        key_ptrs = keys_base + places[:, None] + dims[None, :]
        value_ptrs = key_ptrs + half_stride
        if MASKED:
            inside = (keys >= low) & (keys < high)
            mask = inside[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(key_ptrs, mask=mask, other=0.0)
            v = tl.load(value_ptrs, mask=mask, other=0.0)
        elif WIDTH != HEAD_DIM:
            mask = (dims < HEAD_DIM)[None, :]
            k = tl.load(key_ptrs, mask=mask, other=0.0)
            v = tl.load(value_ptrs, mask=mask, other=0.0)
        else:
            k = tl.load(key_ptrs)
            v = tl.load(value_ptrs)

        scores = tl.dot(queries, tl.trans(_converted(k, queries.dtype)), input_precision=PRECISION)
        if SOFTCAP:
            # cap * tanh(x) with tanh(x) = 1 - 2 / (1 + exp(2 x)); the factors of x are in score_scale.
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp2(scores * score_scale)))
            factor = 1.0
        else:
            factor = score_scale
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (position[:, None] >= keys[None, :])
            if WINDOW:
                seen = seen & (position[:, None] - keys[None, :] < window)
            if TREE:
                own = keys - before
                is_own = (own >= 0) & (own < own_len)
                told = tl.load(
                    visible + (seen_rows[:, None] + own[None, :]), mask=is_own[None, :] & lane_valid[:, None], other=0
                )
                seen = tl.where((own >= 0)[None, :], told != 0, seen)
            scores = tl.where(seen, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - new_top[:, None])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None]
        acc = tl.dot(weights.to(queries.dtype), _converted(v, queries.dtype), acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total
