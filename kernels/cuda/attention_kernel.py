"""The Triton kernel of paged attention: one tile of queries against the keys of one row, or against a part of them.

A program has the query heads that share one head of keys, for some consecutive tokens of a row: BLOCK_M lanes, of which
lane i is head `i % GROUP` of token `i // GROUP`. It goes through the row's keys in tiles of BLOCK_N that start at
multiples of BLOCK_N. Scores are in powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.attention_merge import LOG2E, LOWEST, merge_parts, store_part, write_result
from kernels.cuda.attention_scan import scan_keys

LIST_COLUMNS = 8
"""int32 numbers of an entry of the list of tiles: row of the page table, first token within the row, row's first token
within the batch, row's number of tokens, border between shared and own keys; the rest keeps entries aligned."""

WHOLE, SHARED, REST = 0, 1, 2
"""What part of a row's keys a launch goes through: all; those before the border, all visible; those after it, where
results of SHARED are merged in."""

_SHARED = tl.constexpr(SHARED)
_REST = tl.constexpr(REST)
_LIST_COLUMNS = tl.constexpr(LIST_COLUMNS)


@triton.jit(
    do_not_specialize=["table_stride", "visible_stride", "window", "q_len", "want_splits", "min_tiles", "max_tiles"],
    do_not_specialize_on_alignment=["lse", "sinks", "table", "kv_lens", "visible", "depths"],
)
def attend(
    q,
    kv,
    out,
    lse,
    sinks,
    table,
    kv_lens,
    tiles,
    visible,
    depths,
    shared_out,
    shared_lse,
    scratch,
    tickets,
    q_token_stride,
    q_head_stride,
    page_stride,
    half_stride,
    token_stride,
    head_stride,
    table_stride,
    visible_stride,
    score_scale,
    cap,
    v_scale,
    window,
    q_len,
    want_splits,
    min_tiles,
    max_tiles,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USED: tl.constexpr,
    COLUMNS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PART: tl.constexpr,
    TREE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (heads of keys, tiles of queries, splits of a row's keys).

    tiles: the list of tiles, or None: every row has q_len tokens. Pointers that are None stand for what is not asked
    for: lse, sinks, visible and depths (no tree), shared_* (no merging), scratch and tickets (one split).
    want_splits: how many splits fill the device; a split has min_tiles to max_tiles tiles of keys if the grid allows.
    USED: lanes that can be in use, rounded up; COLUMNS: dimensions, and AT_ONCE: splits, merged at
    a time. TWO_LOOPS: go through the tiles of
    keys that every lane sees without masks, then through the others.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0)
    # A row's last tokens see most: the longest tiles start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    split = tl.program_id(2)
    if tiles is None:
        tiles_of_row = tl.cdiv(q_len, TOKENS)
        row = tile // tiles_of_row
        first = (tile % tiles_of_row) * TOKENS
        origin = row * q_len
        row_len = q_len
        border = 0
    else:
        entry = tiles + tile * _LIST_COLUMNS
        row = tl.load(entry)
        first = tl.load(entry + 1)
        origin = tl.load(entry + 2)
        row_len = tl.load(entry + 3)
        border = tl.load(entry + 4)
    if PART == _SHARED:
        kv_len = border
    else:
        kv_len = tl.load(kv_lens + row).to(tl.int32)

    lanes = tl.arange(0, BLOCK_M)
    token = first + lanes // GROUP
    valid = (lanes < TOKENS * GROUP) & (token < row_len)
    before = kv_len - row_len
    seen_rows = token
    if TREE:
        depth = tl.load(depths + origin + token, mask=valid, other=0)
        position = before + depth
        first_position = before + tl.min(tl.where(valid, depth, 1 << 30), axis=0)
        last_position = before + tl.max(tl.where(valid, depth, 0), axis=0)
        seen_rows = (origin + token) * visible_stride
    else:
        position = before + token
        first_position = before + first
        last_position = before + tl.minimum(first + TOKENS, row_len) - 1
    # Keys [low, high) are of use, and every lane sees those of [full_low, full_high).
    if PART == _SHARED:
        high = kv_len
        full_high = kv_len
    elif TREE:
        high = kv_len
        full_high = before
    else:
        high = last_position + 1
        full_high = first_position + 1
    low = 0
    if PART == _REST:
        low = border
    full_low = low
    if WINDOW:
        low = tl.maximum(first_position - window + 1, 0)
        full_low = tl.maximum(last_position - window + 1, 0)
        if TREE:
            # Among the step's own tokens only the tree decides.
            low = tl.minimum(low, tl.maximum(before, 0))

    first_tile = low // BLOCK_N
    num_tiles = tl.maximum(tl.cdiv(tl.maximum(high, 0), BLOCK_N) - first_tile, 0)
    end_tile = first_tile + num_tiles
    num_splits = 1
    if scratch is not None:
        # Of the row's own length, so that a short row is not cut into crumbs; every program of the row finds the same.
        size = tl.minimum(tl.maximum(tl.cdiv(num_tiles, want_splits), min_tiles), max_tiles)
        size = tl.maximum(size, tl.cdiv(num_tiles, tl.num_programs(2)))
        num_splits = tl.maximum(tl.cdiv(num_tiles, size), 1)
        if split >= num_splits:
            return
        first_tile += split * size
        end_tile = tl.minimum(first_tile + size, end_tile)

    dims = tl.arange(0, WIDTH)
    num_heads = tl.num_programs(0) * GROUP
    q_ptrs = (
        q
        + (origin + token).to(tl.int64)[:, None] * q_token_stride
        + (head * GROUP + lanes % GROUP)[:, None] * q_head_stride
        + dims[None, :]
    )
    queries = tl.load(q_ptrs, mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    keys_base = kv + head.to(tl.int64) * head_stride
    row_table = table + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    top = tl.full([BLOCK_M], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if PART == _REST:
        # One split goes on from where the shared keys ended.
        has_shared = valid & (border > 0) & (split == 0)
        place = (origin + token).to(tl.int64) * num_heads + head * GROUP + lanes % GROUP
        found = tl.load(shared_lse + place, mask=has_shared, other=0.0)
        top = tl.where(has_shared, found * LOG2E, LOWEST)
        total = tl.where(has_shared, 1.0, 0.0)
        acc = tl.load(
            shared_out + place[:, None] * HEAD_DIM + dims[None, :],
            mask=has_shared[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
    # [first_tile, full_from) and [full_to, end_tile) need masks.
    full_to = end_tile
    full_from = end_tile
    if TWO_LOOPS:
        full_to = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BLOCK_N, first_tile), end_tile)
        full_from = tl.minimum(tl.maximum(tl.cdiv(full_low, BLOCK_N), first_tile), full_to)
        acc, top, total = scan_keys(
            acc,
            top,
            total,
            queries,
            keys_base,
            row_table,
            page_stride,
            half_stride,
            token_stride,
            low,
            high,
            full_from,
            full_to,
            0,
            full_to - full_from,
            position,
            before,
            row_len,
            visible,
            seen_rows,
            valid,
            score_scale,
            cap,
            window,
            HEAD_DIM,
            WIDTH,
            PAGE_SIZE,
            BLOCK_N,
            False,
            False,
            False,
            False,
            SOFTCAP,
            PRECISION,
        )
    acc, top, total = scan_keys(
        acc,
        top,
        total,
        queries,
        keys_base,
        row_table,
        page_stride,
        half_stride,
        token_stride,
        low,
        high,
        first_tile,
        full_from - first_tile,
        full_to - full_from,
        full_from - first_tile + end_tile - full_to,
        position,
        before,
        row_len,
        visible,
        seen_rows,
        valid,
        score_scale,
        cap,
        window,
        HEAD_DIM,
        WIDTH,
        PAGE_SIZE,
        BLOCK_N,
        True,
        PART != _SHARED,
        TREE,
        WINDOW,
        SOFTCAP,
        PRECISION,
    )

    if scratch is not None:  # noqa: SIM102 (known when the kernel is compiled, unlike the other condition)
        if num_splits > 1:
            slot = tile * tl.num_programs(0) + head
            num_slots = tl.num_programs(0) * tl.num_programs(1)
            scratch_lse = scratch + num_slots * tl.num_programs(2) * USED * WIDTH
            store_part(acc, top, total, scratch, scratch_lse, slot, split, valid, USED, WIDTH)
            # All threads' stores come before the one ticket, which releases them to whoever draws the last.
            tl.debug_barrier()
            ticket = tl.atomic_add(tickets + slot, 1, sem="acq_rel", scope="gpu")
            if ticket == num_splits - 1:
                num_lanes = tl.minimum(row_len - first, TOKENS) * GROUP
                for first_dim in tl.static_range(0, WIDTH, COLUMNS):
                    acc_all, top_all, total_all = merge_parts(
                        scratch, scratch_lse, slot, num_splits, num_lanes, first_dim, USED, WIDTH, COLUMNS, AT_ONCE
                    )
                    write_result(
                        acc_all,
                        top_all,
                        total_all,
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
                        GROUP,
                        HEAD_DIM,
                        COLUMNS,
                        USED,
                        TOKENS,
                    )
                tl.store(tickets + slot, 0)
            return
    write_result(
        acc,
        top,
        total,
        0,
        out,
        lse,
        sinks,
        first,
        origin,
        row_len,
        head,
        num_heads,
        v_scale,
        GROUP,
        HEAD_DIM,
        WIDTH,
        BLOCK_M,
        TOKENS,
    )
