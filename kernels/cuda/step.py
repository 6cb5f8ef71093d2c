"""Where a step begins and ends, in Triton; see kernels/step.py for what the functions do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import is_wanted
from kernels.step import SlotTensors, StepInputs

TOKEN_BLOCK = 1024
"""Tokens of a row that its program makes at a time, where rows may have more than one."""
PAGE_BLOCK = 2048
"""Page ids that it copies at a time."""
ROW_BLOCK = 32
"""Rows of a program of advance_ends."""


def step_inputs(
    rows: Tensor,
    q_starts: Tensor | None,
    host_tokens: Tensor | None,
    slots: SlotTensors,
    page_size: int,
    scratch_location: int,
    empties_ended: bool,
    out: StepInputs,
) -> None:
    """`kernels.step.step_inputs`, in one launch; of the page table, what is behind a row's length is not copied.

    The scratch slot's seq_len must be 0, as it is after each call.
    """
    num_rows = len(rows)
    if num_rows == 0:
        return
    (_, max_pages), width = slots.page_table.shape, out.page_table.shape[1]
    vectors = (rows, slots.seq_len, slots.last_token, slots.ended, out.tokens, out.positions, out.locations)
    assert all(vector.is_contiguous() for vector in (*vectors, out.kv_lens)), "vectors must be dense"
    assert all(vector is None or vector.is_contiguous() for vector in (q_starts, host_tokens)), "vectors must be dense"
    assert slots.page_table.stride(1) == 1 or max_pages == 1, "rows must be dense"
    assert out.page_table.stride(1) == 1 or width <= 1, "rows must be dense"
    assert len(out.page_table) == num_rows and width <= max_pages, (out.page_table.shape, num_rows, max_pages)
    pdl = is_wanted(rows)
    kernel: Any = fill_rows[(num_rows,)]
    kernel(
        rows,
        q_starts,
        host_tokens,
        slots.seq_len,
        slots.last_token,
        slots.ended.view(torch.uint8),
        slots.page_table,
        out.tokens,
        out.positions,
        out.locations,
        out.kv_lens,
        out.page_table,
        len(slots.seq_len) - 1,
        max_pages,
        width,
        slots.page_table.stride(0),
        out.page_table.stride(0),
        scratch_location,
        PAGE_SIZE=page_size,
        EMPTIES_ENDED=empties_ended,
        TOKENS=1 if q_starts is None else TOKEN_BLOCK,
        PAGES=min(triton.next_power_of_2(max_pages), PAGE_BLOCK),
        PDL=pdl,
        launch_pdl=pdl,
    )


def advance_ends(slots: SlotTensors, rows: Tensor, drawn: Tensor) -> None:
    """`kernels.step.advance_ends`, in one launch."""
    num_rows, widest = len(rows), slots.stop_ids.shape[1]
    if num_rows == 0:
        return
    vectors = (rows, drawn, slots.last_token, slots.ended)
    assert all(vector.is_contiguous() for vector in vectors), "vectors must be dense"
    assert widest <= 1 or slots.stop_ids.stride(1) == 1, "the ids of a slot must be dense"
    pdl = is_wanted(rows)
    kernel: Any = end_rows[(triton.cdiv(num_rows, ROW_BLOCK),)]
    kernel(
        rows,
        drawn,
        slots.last_token,
        slots.ended.view(torch.uint8),
        slots.stop_ids,
        num_rows,
        widest,
        slots.stop_ids.stride(0),
        ROWS=ROW_BLOCK,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )


@triton.jit(
    # Tables are read as they are written, so that ids stay in the threads that have them.
    do_not_specialize=["width", "table_stride", "out_stride"],
    do_not_specialize_on_alignment=[
        *("rows", "q_starts", "host_tokens", "tokens", "positions", "locations", "kv_lens", "out_table"),
    ],
)
def fill_rows(
    rows,
    q_starts,
    host_tokens,
    seq_len,
    last_token,
    ended,
    page_table,
    tokens,
    positions,
    locations,
    kv_lens,
    out_table,
    scratch_slot,
    max_pages,
    width,
    table_stride,
    out_stride,
    scratch_location,
    PAGE_SIZE: tl.constexpr,
    EMPTIES_ENDED: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of one row: its tokens, TOKENS at a time, and its pages, PAGES at a time.

    One program alone reads and advances a slot's length, so that none can see what another one has written.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    context = tl.load(seq_len + slot)
    last = tl.load(last_token + slot)
    has_ended = tl.load(ended + slot) != 0
    start, q_len = row, 1
    if q_starts is not None:
        begin = tl.load(q_starts + row)
        start, q_len = begin.to(tl.int64), tl.load(q_starts + row + 1) - begin
    length = context + q_len
    slot_table = page_table + slot * table_stride

    for first in range(0, q_len, TOKENS):
        offset = first + tl.arange(0, TOKENS)
        mask = offset < q_len
        token = tl.zeros([TOKENS], tl.int64) + last
        if host_tokens is not None:
            told = tl.load(host_tokens + start + offset, mask=mask, other=0).to(tl.int64)
            token = tl.where(told < 0, token, told)
        position = context + offset
        column = tl.minimum(position // PAGE_SIZE, max_pages - 1)
        page = tl.load(slot_table + column, mask=mask, other=0).to(tl.int64)
        location = page * PAGE_SIZE + position % PAGE_SIZE
        tl.store(tokens + start + offset, tl.where(has_ended, 0, token), mask=mask)
        tl.store(positions + start + offset, tl.where(has_ended, 0, position), mask=mask)
        tl.store(locations + start + offset, tl.where(has_ended, scratch_location, location), mask=mask)

    seen = length
    if EMPTIES_ENDED:
        seen = tl.where(has_ended, 0, length)
    tl.store(kv_lens + row, seen)
    used = tl.minimum((seen + (PAGE_SIZE - 1)) // PAGE_SIZE, width).to(tl.int32)
    for first_column in range(0, used, PAGES):
        columns = first_column + tl.arange(0, PAGES)
        ids = tl.load(slot_table + columns, mask=columns < used, other=0)
        tl.store(out_table + row * out_stride + columns, ids, mask=columns < used)

    # Every thread reads the length, and one writes it: not before all have read.
    tl.debug_barrier()
    tl.store(seq_len + slot, tl.where(slot == scratch_slot, 0, length))


@triton.jit(do_not_specialize=["num_rows", "widest", "stop_stride"], do_not_specialize_on_alignment=["rows", "drawn"])
def end_rows(
    rows,
    drawn,
    last_token,
    ended,
    stop_ids,
    num_rows,
    widest,
    stop_stride,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows, each one thread's: what it reads no other one writes, but for the scratch slot, where all write what
    is there."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(rows + row, mask=mask, other=0)
    had_ended = tl.load(ended + slot, mask=mask, other=1) != 0
    token = tl.where(had_ended, 0, tl.load(drawn + row, mask=mask, other=0))
    ends = had_ended | (token < 0)
    for i in tl.range(0, widest, loop_unroll_factor=8):
        ends = ends | (tl.load(stop_ids + slot * stop_stride + i, mask=mask, other=-1) == token)
    tl.store(drawn + row, token, mask=mask)
    tl.store(last_token + slot, tl.maximum(token, 0).to(tl.int64), mask=mask)
    tl.store(ended + slot, ends.to(tl.uint8), mask=mask)
