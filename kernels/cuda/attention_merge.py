"""The end of paged attention in Triton: putting parts of a context together, and writing the result."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-1.0e30)
"""Stands for the maximum of no scores: finite, so that the difference of two of them is no NaN."""

LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def store_part(acc, top, total, scratch, scratch_lse, slot, split, valid, USED: tl.constexpr, WIDTH: tl.constexpr):
    """Result and lse (of powers of two) of one split of a tile's keys."""
    lanes = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, WIDTH)
    place = (slot * tl.num_programs(2) + split) * USED + lanes
    share = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(scratch + place[:, None] * WIDTH + dims[None, :], share, mask=valid[:, None])
    tl.store(scratch_lse + place, top + tl.log2(total), mask=valid)


@triton.jit
def merge_parts(
    scratch,
    scratch_lse,
    slot,
    num_splits,
    num_lanes,
    first_dim,
    USED: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Running (acc, top, total) of all splits of a tile, taken AT_ONCE by AT_ONCE in their order; of acc, COLUMNS
    dimensions from first_dim on.
    """
    lanes = tl.arange(0, USED)
    dims = first_dim + tl.arange(0, COLUMNS)
    top = tl.full([USED], LOWEST, tl.float32)
    total = tl.zeros([USED], tl.float32)
    acc = tl.zeros([USED, COLUMNS], tl.float32)
    for begin in tl.range(0, num_splits, AT_ONCE, num_stages=1):
        split = begin + tl.arange(0, AT_ONCE)
        place = (slot * tl.num_programs(2) + split)[:, None] * USED + lanes[None, :]
        mask = (split < num_splits)[:, None] & (lanes < num_lanes)[None, :]
        # Past the first level of cache, which may hold lines of an earlier step.
        part_lse = tl.load(scratch_lse + place, mask=mask, other=-float("inf"), cache_modifier=".cg")
        parts = tl.load(
            scratch + place[:, :, None] * WIDTH + dims[None, None, :],
            mask=mask[:, :, None],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(part_lse, axis=0))
        weights = tl.exp2(part_lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        total = total * decay + tl.sum(weights, axis=0)
        acc = acc * decay[:, None] + tl.sum(parts * weights[:, :, None], axis=0)
        top = new_top
    return acc, top, total


@triton.jit
def write_result(
    acc,
    top,
    total,
    first_dim,
    out,
    lse,
    sinks,
    first,
    origin,
    row_len,
    head,
    num_heads,
    v_scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Count the sink, and write the result of the first LANES lanes: COLUMNS dimensions from first_dim on."""
    lanes = tl.arange(0, LANES)
    token = first + lanes // GROUP
    valid = (lanes < TOKENS * GROUP) & (token < row_len)
    query_head = head * GROUP + lanes % GROUP
    place = (origin + token).to(tl.int64) * num_heads + query_head
    dims = first_dim + tl.arange(0, COLUMNS)
    places = place[:, None] * HEAD_DIM + dims[None, :]
    mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
    if lse is not None:
        tl.store(lse + place, (top + tl.log2(total)) * _LN2, mask=valid)
    if sinks is not None:
        total = total + tl.exp2(tl.load(sinks + query_head, mask=valid, other=0.0) * LOG2E - top)
    # No key and no sink: the sum is 0, and so is the result.
    factor = v_scale / tl.where(total == 0.0, 1.0, total)
    tl.store(out + places, (acc * factor[:, None]).to(out.dtype.element_ty), mask=mask)
