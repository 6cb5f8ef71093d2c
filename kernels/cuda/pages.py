"""Page tables of a step's rows, and moving keys and values, in Triton; see kernels/pages.py for what they do."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.pages import KVLayers

BLOCK = 1024
"""Page ids that a program copies at a time."""
MAX_ROWS = 1024
"""Rows whose pages it counts at a time."""


def gather_pages(page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, num_columns: int) -> Tensor:
    """`kernels.pages.gather_pages`, in one launch; what is behind a row's pages is not read."""
    num_rows = len(rows)
    out = torch.empty((num_rows, num_columns), dtype=torch.int32, device=page_table.device)
    if out.numel() == 0:
        return out
    assert page_table.stride(1) == 1 and num_columns <= page_table.shape[1]
    assert all(vector.is_contiguous() for vector in (rows, kv_lens)), "vectors must be dense"
    kernel: Any = gather_page_rows[(num_rows, triton.cdiv(num_columns, BLOCK))]
    kernel(page_table, rows, kv_lens, out, page_table.stride(0), num_columns, PAGE_SIZE=page_size, BLOCK=BLOCK)
    return out


def page_lists(page_table: Tensor, kv_lens: Tensor, page_size: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.pages.page_lists`, in one launch."""
    num_rows, width = page_table.shape
    device = page_table.device
    if num_rows == 0:
        pages, starts = (torch.zeros(length, dtype=torch.int32, device=device) for length in (size, 1))
        return pages, starts, torch.empty(0, dtype=torch.int32, device=device)
    pages = torch.empty(size, dtype=torch.int32, device=device)
    starts = torch.empty(num_rows + 1, dtype=torch.int32, device=device)
    last = torch.empty(num_rows, dtype=torch.int32, device=device)
    assert (width <= 1 or page_table.stride(1) == 1) and kv_lens.is_contiguous(), "lengths and tables must be dense"
    kernel: Any = list_pages[(num_rows + 1, max(triton.cdiv(width, BLOCK), 1))]
    kernel(
        page_table,
        kv_lens,
        pages,
        starts,
        last,
        num_rows,
        size,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=BLOCK,
        ROWS=MAX_ROWS,
    )
    return pages, starts, last


def compact_kv(layers: KVLayers, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
    """`kernels.pages.compact_kv`, in one launch."""
    kv = layers.kv[0]
    _, _, page_size, num_heads, head_dim = kv.shape
    num_rows, width = sources.shape
    if num_rows == 0 or width == 0 or kv.numel() == 0:
        return
    page, half, token, head, element = kv.stride()
    assert element == 1 and counts.is_contiguous(), "the elements of a head, and counts, must be dense"
    if head == head_dim or num_heads == 1:
        num_heads, head_dim, head = 1, num_heads * head_dim, 0
    block = min(max(triton.next_power_of_2(num_heads * head_dim), 32), 1024)
    kernel: Any = move_places[(len(layers.kv) * triton.cdiv(num_heads * head_dim, block), num_rows)]
    kernel(
        layers.addresses,
        sources,
        targets,
        counts,
        *sources.stride(),
        *targets.stride(),
        page,
        half,
        token,
        head,
        PAGE_SIZE=page_size,
        SIZE=num_heads * head_dim,
        HEAD_DIM=head_dim,
        PLACES=min(width, 4),
        BLOCK=block,
        ITEM_BYTES=kv.dtype.itemsize,
        ALIGNED=math.gcd(16, *(place.data_ptr() for place in layers.kv)),
        # Not more threads than elements: each must be read and written by one thread.
        num_warps=max(block // 256, 1),
    )


@triton.jit(do_not_specialize=["num_columns", "stride"])
def gather_page_rows(page_table, rows, kv_lens, out, stride, num_columns, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of a row of the result."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used = (tl.load(kv_lens + row) + (PAGE_SIZE - 1)) // PAGE_SIZE
    inside = columns < num_columns
    pages = tl.load(page_table + tl.load(rows + row) * stride + columns, mask=inside & (columns < used), other=0)
    tl.store(out + row * num_columns + columns, pages, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "size", "stride"], do_not_specialize_on_alignment=["page_table", "kv_lens"])
def list_pages(
    page_table,
    kv_lens,
    pages,
    starts,
    last,
    num_rows,
    size,
    stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (i, j): BLOCK pages of row i from column j * BLOCK on; the row behind the last fills the rest with zeros.

    Each program counts the pages before its row by itself: cheaper than a launch that tells it.
    """
    row = tl.program_id(0)
    before = tl.zeros([ROWS], tl.int64)
    for first in range(0, row, ROWS):
        others = first + tl.arange(0, ROWS)
        before += (tl.load(kv_lens + others, mask=others < row, other=0) + (PAGE_SIZE - 1)) // PAGE_SIZE
    start = tl.sum(before, axis=0)
    if tl.program_id(1) == 0:
        tl.store(starts + row, start.to(tl.int32))
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if row < num_rows:
        kv_len = tl.load(kv_lens + row)
        count = (kv_len + (PAGE_SIZE - 1)) // PAGE_SIZE
        if tl.program_id(1) == 0:
            tokens = tl.where(count > 0, kv_len - (count - 1) * PAGE_SIZE, 0)
            tl.store(last + row, tokens.to(tl.int32))
        mask = (offsets < count) & (start + offsets < size)
        ids = tl.load(page_table + row.to(tl.int64) * stride + offsets, mask=mask, other=0)
        tl.store(pages + start + offsets, ids, mask=mask)
    else:
        for place in range(start, size, BLOCK * tl.num_programs(1)):
            tl.store(pages + place + offsets, tl.zeros([BLOCK], tl.int32), mask=place + offsets < size)


@triton.jit
def move_places(
    addresses,
    sources,
    targets,
    counts,
    source_row,
    source_column,
    target_row,
    target_column,
    page_stride,
    half_stride,
    token_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """BLOCK elements of a layer's keys, and of its values, for all places of a row, PLACES at a time.

    All of a group is read before any of it is written: one after the other would give the same, since no source is an
    earlier target, and would wait for the memory once for each place. What a thread reads no other thread writes.
    """
    BLOCKS: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = tl.program_id(1).to(tl.int64)
    elements = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = elements < SIZE
    # A launch finds out how pointers are aligned that it is given, but not of those that are in memory. A copy needs no
    # arithmetic, so any type of that size will do.
    address = tl.load(addresses + tl.program_id(0) // BLOCKS)
    if ITEM_BYTES == 1:
        kv = address.to(tl.pointer_type(tl.uint8))
    elif ITEM_BYTES == 2:
        kv = address.to(tl.pointer_type(tl.int16))
    else:
        tl.static_assert(ITEM_BYTES == 4)
        kv = address.to(tl.pointer_type(tl.int32))
    kv = tl.multiple_of(kv, ALIGNED)
    kv += (elements // HEAD_DIM).to(tl.int64) * head_stride + elements % HEAD_DIM
    sources += row * source_row
    targets += row * target_row
    count = tl.load(counts + row).to(tl.int32)
    for first in range(0, count, PLACES):
        read = ()
        for i in tl.static_range(PLACES):
            mask = inside & (first + i < count)
            source = tl.load(sources + (first + i) * source_column, mask=first + i < count, other=0)
            place = kv + (source // PAGE_SIZE * page_stride + source % PAGE_SIZE * token_stride)
            read += (tl.load(place, mask=mask), tl.load(place + half_stride, mask=mask))
        for i in tl.static_range(PLACES):
            mask = inside & (first + i < count)
            target = tl.load(targets + (first + i) * target_column, mask=first + i < count, other=0)
            place = kv + (target // PAGE_SIZE * page_stride + target % PAGE_SIZE * token_stride)
            tl.store(place, read[2 * i], mask=mask)
            tl.store(place + half_stride, read[2 * i + 1], mask=mask)
