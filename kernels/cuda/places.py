"""Places behind rows' texts, in Triton; see kernels/places.py for what the function does."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.places import DraftPass, DraftPlaces, Passes
from kernels.speculative import VerifyLimits
from kernels.step import SlotTensors

PAGE_BLOCK = 2048
"""Page ids that a program copies at a time."""
ALIGNED = tl.constexpr(2)
"""Numbers, of 8 bytes each: where a pass's begin is a multiple of them, as kernels take it to be that have met one."""


def draft_places(
    rows: Tensor,
    passes: Passes,
    slots: SlotTensors,
    limits: VerifyLimits,
    page_size: int,
    scratch_location: int,
    num_columns: int,
) -> DraftPlaces:
    """`kernels.places.draft_places`, in one launch; of page tables, what is behind a row is not copied."""
    num_rows, size = len(rows), passes.size
    assert size == 1 or not passes.growth, "trees begin with one node"
    per_pass = [num_rows * passes.tokens(number) for number in range(passes.num)]
    stride = _aligned(num_rows * size)

    def vector(length: int) -> Tensor:
        return torch.empty(length, dtype=torch.int64, device=rows.device)

    positions, locations = (vector(sum(map(_aligned, per_pass))) for _ in range(2))
    tokens, kv_lens = vector(num_rows * size), vector(passes.num * stride)
    table = torch.empty(num_rows * size, num_columns, dtype=torch.int32, device=rows.device)
    done, begin = [], 0
    for number, length in enumerate(per_pass):
        seen = kv_lens[number * stride : number * stride + num_rows * size]
        done.append(DraftPass(positions[begin : begin + length], locations[begin : begin + length], seen))
        begin += _aligned(length)
    places = DraftPlaces(tokens, table, tuple(done))
    if num_rows == 0:
        return places
    max_pages = slots.page_table.shape[1]
    assert rows.is_contiguous() and slots.page_table.stride(1) == 1 and num_columns <= max_pages
    block = triton.next_power_of_2(passes.most)
    kernel: Any = place_rows[(num_rows,)]
    kernel(
        rows,
        slots.seq_len,
        slots.last_token,
        slots.ended.view(torch.uint8),
        limits.full_lens,
        slots.page_table,
        tokens,
        positions,
        locations,
        kv_lens,
        table,
        passes.num,
        passes.most,
        passes.filler,
        max_pages,
        num_columns,
        slots.page_table.stride(0),
        scratch_location,
        PAGE_SIZE=page_size,
        TOKENS=size,
        GROWTH=passes.growth,
        SIZE=block,
        PAGES=min(triton.next_power_of_2(max_pages), PAGE_BLOCK),
        num_warps=1 if block <= 128 else 4,
    )
    return places


def _aligned(length: int) -> int:
    return -(-length // ALIGNED.value) * ALIGNED.value


@triton.jit(do_not_specialize=["num_passes", "most", "filler", "max_pages", "width", "table_stride"])
def place_rows(
    rows,
    seq_len,
    last_token,
    ended,
    full_lens,
    page_table,
    tokens,
    positions,
    locations,
    kv_lens,
    out_table,
    num_passes,
    most,
    filler,
    max_pages,
    width,
    table_stride,
    scratch_location,
    PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    GROWTH: tl.constexpr,
    SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """All passes of a row, and its pages. SIZE: a power of two, at least `most`."""
    row, num_rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    slot = tl.load(rows + row)
    context = tl.load(seq_len + slot)
    last = tl.load(last_token + slot)
    end = tl.load(full_lens + slot) - 1
    active = (context < end) & (tl.load(ended + slot) == 0)
    column = tl.arange(0, SIZE)
    mask = column < most
    place = context + column
    usable = active & (place < end)
    page = tl.load(page_table + slot * table_stride + tl.minimum(place // PAGE_SIZE, max_pages - 1), mask=mask, other=0)
    location = tl.where(usable, page.to(tl.int64) * PAGE_SIZE + place % PAGE_SIZE, scratch_location)
    stride = (num_rows * TOKENS + (ALIGNED - 1)) // ALIGNED * ALIGNED
    if GROWTH == 0:
        number = column // TOKENS
        out = number * stride + row * TOKENS + column % TOKENS
        tl.store(positions + out, tl.where(usable, place, 0), mask=mask)
        tl.store(locations + out, location, mask=mask)
        first = context + number * TOKENS
        length = tl.where(active & (first < end), tl.minimum(first + TOKENS, end), 1)
        tl.store(kv_lens + out, length, mask=mask)
        tl.store(tokens + row * TOKENS + column, tl.where(column == 0, last, filler), mask=column < TOKENS)
    else:
        position = tl.where(usable, context + (column + (GROWTH - 1)) // GROWTH, 0)
        base = tl.where(active, context, 0)
        begin = 0
        for number in range(num_passes):
            size = 1 + number * GROWTH
            out = begin + row * size + column
            tl.store(positions + out, position, mask=column < size)
            tl.store(locations + out, location, mask=column < size)
            tl.store(kv_lens + number * stride + row, base + size)
            begin += (num_rows * size + (ALIGNED - 1)) // ALIGNED * ALIGNED
        tl.store(tokens + row, last)
    reached = tl.where(active, context, 0) + most
    used = tl.minimum((reached + (PAGE_SIZE - 1)) // PAGE_SIZE, width).to(tl.int32)
    for first_column in range(0, used, PAGES):
        columns = first_column + tl.arange(0, PAGES)
        ids = tl.load(page_table + slot * table_stride + columns, mask=columns < used, other=0)
        for copy in range(TOKENS):
            tl.store(out_table + (row * TOKENS + copy) * width + columns, ids, mask=columns < used)
