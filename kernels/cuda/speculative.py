"""Verifying drafted tokens, in Triton; see kernels/speculative.py for what the functions do. One program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from kernels.step import SlotTensors, StepInputs

PAGE_BLOCK = 2048
"""Page ids that a program copies at a time."""
TEXT_BLOCK = 1024
"""Places of a text that it looks at at a time."""


def verify_inputs(
    rows: Tensor,
    drafts: Drafts,
    slots: SlotTensors,
    limits: VerifyLimits,
    page_size: int,
    scratch_location: int,
    out: StepInputs,
) -> Nodes:
    """`kernels.speculative.verify_inputs`, in one launch; of page tables, what is behind a row is not copied."""
    num_rows, num_drafts = drafts.tokens.shape
    size, device = num_drafts + 1, rows.device
    is_tree = drafts.parents is not None
    context = torch.empty(num_rows, dtype=torch.int64, device=device)
    usable = torch.empty(num_rows, size, dtype=torch.bool, device=device)
    depths = torch.empty(num_rows, size, dtype=torch.int32, device=device)
    kv_lens = torch.empty(num_rows, size, dtype=torch.int64, device=device)
    visible = torch.empty(num_rows, size, size, dtype=torch.bool, device=device) if is_tree else None
    nodes = Nodes(drafts, context, usable, depths, kv_lens, visible)
    if num_rows == 0:
        return nodes
    assert all(part is None or part.is_contiguous() for part in (rows, drafts.tokens, drafts.parents)), "must be dense"
    assert slots.page_table.stride(1) == out.page_table.stride(1) == 1, "rows must be dense"
    max_pages = slots.page_table.shape[1]
    kernel: Any = node_rows[(num_rows,)]
    kernel(
        rows,
        drafts.tokens,
        drafts.parents,
        slots.seq_len,
        slots.last_token,
        slots.ended.view(torch.uint8),
        limits.full_lens,
        limits.most_drafts,
        slots.page_table,
        out.tokens,
        out.positions,
        out.locations,
        out.kv_lens,
        out.page_table,
        context,
        usable.view(torch.uint8),
        depths,
        kv_lens,
        None if visible is None else visible.view(torch.uint8),
        num_drafts,
        max_pages,
        out.page_table.shape[1],
        slots.page_table.stride(0),
        out.page_table.stride(0),
        scratch_location,
        PAGE_SIZE=page_size,
        SIZE=triton.next_power_of_2(size),
        PAGES=min(triton.next_power_of_2(max_pages), PAGE_BLOCK),
        num_warps=1 if not is_tree else 4,
    )
    return nodes


def take_accepted(rows: Tensor, nodes: Nodes, drawn: Tensor, slots: SlotTensors, limits: VerifyLimits) -> Taken:
    """`kernels.speculative.take_accepted`, in one launch."""
    num_rows, size = nodes.usable.shape
    device = rows.device
    numbers = torch.empty(num_rows, size + 2, dtype=torch.int32, device=device)
    way = torch.empty(num_rows, size, dtype=torch.int64, device=device)
    taken = Taken(numbers, way)
    if num_rows == 0:
        return taken
    assert drawn.is_contiguous() and rows.is_contiguous(), "must be dense"
    widest = slots.stop_ids.shape[1]
    assert widest <= 1 or slots.stop_ids.stride(1) == 1, "the ids of a slot must be dense"
    kernel: Any = walk_rows[(num_rows,)]
    kernel(
        rows,
        drawn,
        nodes.drafts.tokens,
        nodes.drafts.parents,
        nodes.usable.view(torch.uint8),
        nodes.context,
        slots.seq_len,
        slots.last_token,
        slots.ended.view(torch.uint8),
        slots.stop_ids,
        limits.full_lens,
        numbers,
        way,
        size,
        widest,
        slots.stop_ids.stride(0),
        SIZE=triton.next_power_of_2(size),
        STOPS=triton.next_power_of_2(max(widest, 1)),
        num_warps=1,
    )
    return taken


def moves_of(
    rows: Tensor, nodes: Nodes, taken: Taken, page_table: Tensor, page_size: int, scratch_location: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.speculative.moves_of`, in one launch."""
    num_rows, size = taken.way.shape
    places = torch.empty(2, num_rows, size - 1, dtype=torch.int64, device=rows.device)
    sources, targets = places.unbind(0)
    counts = torch.empty(num_rows, dtype=torch.int64, device=rows.device)
    if num_rows == 0:
        return sources, targets, counts
    assert all(part.is_contiguous() for part in (rows, nodes.context, taken.way)), "must be dense"
    assert page_table.stride(1) == 1, "rows must be dense"
    kernel: Any = move_rows[(num_rows,)]
    kernel(
        rows,
        nodes.context,
        taken.way,
        taken.counts,
        page_table,
        sources,
        targets,
        counts,
        size,
        page_table.shape[1],
        page_table.stride(0),
        taken.counts.stride(0),
        scratch_location,
        PAGE_SIZE=page_size,
        SIZE=triton.next_power_of_2(size),
        num_warps=1,
    )
    return sources, targets, counts


def append_tokens(texts: Tensor, seq_len: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor | None) -> None:
    """`kernels.speculative.append_tokens`, in one launch; nobody's column stays as it is."""
    num_rows, num = tokens.shape
    if num_rows == 0:
        return
    assert texts.stride(1) == 1 and tokens.stride(1) == 1 and rows.is_contiguous(), "must be dense"
    kernel: Any = append_rows[(num_rows,)]
    kernel(
        texts,
        seq_len,
        rows,
        tokens,
        counts,
        num,
        texts.shape[1] - 1,
        texts.stride(0),
        tokens.stride(0),
        0 if counts is None else counts.stride(0),
        SIZE=triton.next_power_of_2(num),
        num_warps=1,
    )


def ngram_drafts(
    texts: Tensor, seq_len: Tensor, rows: Tensor, num_drafts: int, least: int, most: int, longest: int
) -> Tensor:
    """`kernels.speculative.ngram_drafts`, in one launch; `longest` does not matter, each text is as long as it is."""
    drafts = torch.empty(len(rows), num_drafts, dtype=torch.int64, device=rows.device)
    if len(rows) == 0 or num_drafts == 0:
        return drafts
    assert texts.stride(1) == 1 and rows.is_contiguous(), "must be dense"
    kernel: Any = match_rows[(len(rows),)]
    kernel(
        texts,
        seq_len,
        rows,
        drafts,
        num_drafts,
        least,
        texts.shape[1] - 2,
        texts.stride(0),
        MOST=most,
        BLOCK=TEXT_BLOCK,
        SIZE=triton.next_power_of_2(num_drafts),
        num_warps=4,
    )
    return drafts


@triton.jit(
    do_not_specialize=["num_drafts", "max_pages", "width", "table_stride", "out_stride"],
    do_not_specialize_on_alignment=["rows", "tokens", "positions", "locations", "kv_lens", "out_table", "context_out"],
)
def node_rows(
    rows,
    draft_tokens,
    parents,
    seq_len,
    last_token,
    ended,
    full_lens,
    most_drafts,
    page_table,
    tokens,
    positions,
    locations,
    kv_lens,
    out_table,
    context_out,
    usable_out,
    depths_out,
    node_lens_out,
    visible_out,
    num_drafts,
    max_pages,
    width,
    table_stride,
    out_stride,
    scratch_location,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    PAGES: tl.constexpr,
):
    """All nodes of a row, and its pages. SIZE: a power of two, at least num_drafts + 1."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    context = tl.load(seq_len + slot)
    end = tl.load(full_lens + slot) - 1
    active = (context < end) & (tl.load(ended + slot) == 0)
    size = num_drafts + 1
    node = tl.arange(0, SIZE)
    mask = node < size
    drafted = tl.load(draft_tokens + row * num_drafts + node - 1, mask=mask & (node > 0), other=-1)
    token = tl.where(node == 0, tl.load(last_token + slot), drafted)
    place = context + node
    usable = active & (place < end) & (node <= tl.load(most_drafts + slot)) & ((node == 0) | (drafted >= 0)) & mask
    if parents is None:
        depth = node
    else:
        # Each node sees what its parent sees, and itself.
        index = tl.arange(0, SIZE)
        visible = ((node[:, None] == 0) & (index[None, :] == 0)).to(tl.int32)
        for child in range(1, size):
            parent = tl.load(parents + row * num_drafts + child - 1)
            seen = tl.sum(tl.where((node == parent)[:, None], visible, 0), axis=0)
            seen = tl.where(index == child, 1, seen)
            visible = tl.where((node == child)[:, None], seen[None, :], visible)
        depth = tl.sum(visible, axis=1) - 1
        at = (row * size + node)[:, None] * size + index[None, :]
        tl.store(visible_out + at, visible.to(tl.uint8), mask=mask[:, None] & (index < size)[None, :])
    column = tl.minimum(place // PAGE_SIZE, max_pages - 1)
    page = tl.load(page_table + slot * table_stride + column, mask=mask, other=0).to(tl.int64)
    out = row * size + node
    tl.store(tokens + out, tl.where(usable, token, 0), mask=mask)
    tl.store(positions + out, tl.where(usable, context + depth, 0), mask=mask)
    location = page * PAGE_SIZE + place % PAGE_SIZE
    last_column = tl.maximum(end - 1, 0) // PAGE_SIZE
    is_own = active & (place // PAGE_SIZE <= last_column)
    tl.store(locations + out, tl.where(is_own, location, scratch_location), mask=mask)
    tl.store(usable_out + out, usable.to(tl.uint8), mask=mask)
    tl.store(depths_out + out, depth.to(tl.int32), mask=mask)
    tl.store(node_lens_out + out, context + depth + 1, mask=mask)
    length = tl.where(active, context + size, size.to(tl.int64))
    tl.store(kv_lens + row, length)
    tl.store(context_out + row, context)
    used = tl.minimum((length + (PAGE_SIZE - 1)) // PAGE_SIZE, width).to(tl.int32)
    # It is written all over where the row is longer than it.
    first_page = tl.load(page_table + slot * table_stride)
    for first in range(0, used, PAGES):
        columns = first + tl.arange(0, PAGES)
        ids = tl.load(page_table + slot * table_stride + columns, mask=columns < used, other=0)
        ids = tl.where(active & (columns > last_column), first_page, ids)
        tl.store(out_table + row * out_stride + columns, ids, mask=columns < used)


@triton.jit(do_not_specialize=["size", "widest", "stop_stride"], do_not_specialize_on_alignment=["rows", "drawn"])
def walk_rows(
    rows,
    drawn,
    draft_tokens,
    parents,
    usable,
    context,
    seq_len,
    last_token,
    ended,
    stop_ids,
    full_lens,
    numbers_out,
    way_out,
    size,
    widest,
    stop_stride,
    SIZE: tl.constexpr,
    STOPS: tl.constexpr,
):
    """One row's walk from node 0. SIZE, STOPS: powers of two, at least size and widest."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    node = tl.arange(0, SIZE)
    mask = node < size
    own = row * size + node
    can = tl.load(usable + own, mask=mask, other=0) != 0
    draws = tl.load(drawn + own, mask=mask, other=0)
    drafts = tl.load(draft_tokens + row * (size - 1) + node - 1, mask=mask & (node > 0), other=-1)
    if parents is None:
        parent = node - 1
    else:
        parent = tl.load(parents + row * (size - 1) + node - 1, mask=mask & (node > 0), other=-1).to(tl.int32)
    child_of = tl.where(can & (node > 0), parent, -1)
    stop = tl.arange(0, STOPS)
    stops = tl.load(stop_ids + slot * stop_stride + stop, mask=stop < widest, other=-1)
    goes_on = tl.sum(tl.where(node == 0, can.to(tl.int32), 0)) != 0
    at = 0
    count = 0
    last = 0
    has_ended = False
    tokens = tl.zeros([SIZE], tl.int32)
    way = tl.zeros([SIZE], tl.int32)
    for depth in range(size):
        token = tl.sum(tl.where(node == at, draws, 0))
        tokens = tl.where((node == depth) & goes_on, token, tokens)
        way = tl.where(node == depth, at, way)
        count += goes_on.to(tl.int32)
        last = tl.where(goes_on, token, last)
        ends = (token < 0) | (tl.sum(((stops == token) & (stops >= 0)).to(tl.int32)) > 0)
        has_ended = has_ended | (goes_on & ends)
        child = tl.min(tl.where((child_of == at) & (drafts == token), node, SIZE))
        goes_on = goes_on & (ends == 0) & (child < SIZE)
        at = tl.where(goes_on, child, at)
    numbers_out += row * (size + 2)
    tl.store(numbers_out + node, tokens, mask=mask)
    tl.store(way_out + own, way.to(tl.int64), mask=mask)
    tl.store(numbers_out + size, count)
    tl.store(numbers_out + size + 1, tl.sum((can & (node > 0)).to(tl.int32)))
    moved = count > 0
    length = tl.load(context + row) + count
    full = length >= tl.load(full_lens + slot) - 1
    tl.store(seq_len + slot, length, mask=moved)
    tl.store(last_token + slot, tl.maximum(last, 0).to(tl.int64), mask=moved)
    tl.store(ended + slot, 1, mask=moved & (has_ended | full))


@triton.jit(
    do_not_specialize=["size", "max_pages", "table_stride", "count_stride"],
    do_not_specialize_on_alignment=["rows", "counts", "targets"],
)
def move_rows(
    rows,
    context,
    way,
    counts,
    page_table,
    sources,
    targets,
    moved,
    size,
    max_pages,
    table_stride,
    count_stride,
    scratch_location,
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
):
    """What moves of one row. SIZE: a power of two, at least size."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    first = tl.load(context + row) + 1
    count = tl.maximum(tl.load(counts + row * count_stride) - 1, 0)
    step = tl.arange(0, SIZE)
    moves = step < count
    source = first - 1 + tl.load(way + row * size + 1 + step, mask=moves, other=0)
    target = first + step
    pages = page_table + slot * table_stride
    last_page = max_pages - 1
    source_page = tl.load(pages + tl.minimum(source // PAGE_SIZE, last_page), mask=moves, other=0).to(tl.int64)
    target_page = tl.load(pages + tl.minimum(target // PAGE_SIZE, last_page), mask=moves, other=0).to(tl.int64)
    out = row * (size - 1) + step
    mask = step < size - 1
    source = tl.where(moves, source_page * PAGE_SIZE + source % PAGE_SIZE, scratch_location)
    target = tl.where(moves, target_page * PAGE_SIZE + target % PAGE_SIZE, scratch_location)
    tl.store(sources + out, source, mask=mask)
    tl.store(targets + out, target, mask=mask)
    tl.store(moved + row, count.to(tl.int64))


@triton.jit(do_not_specialize=["num", "nowhere", "text_stride", "token_stride", "count_stride"])
def append_rows(
    texts, seq_len, rows, tokens, counts, num, nowhere, text_stride, token_stride, count_stride, SIZE: tl.constexpr
):
    """A row's newest tokens, the last of which is at the slot's seq_len."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    valid = num
    if counts is not None:
        valid = tl.load(counts + row * count_stride)
    step = tl.arange(0, SIZE)
    place = tl.load(seq_len + slot) - valid + 1 + step
    mask = (step < valid) & (place >= 0) & (place < nowhere)
    token = tl.load(tokens + row * token_stride + step, mask=mask, other=0)
    tl.store(texts + slot * text_stride + place, token, mask=mask)


@triton.jit
def match_lengths(text, place, last, MOST: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a text's last tokens, MOST at most, are also those up to each place before its last one; int32."""
    matches = place < last
    length = tl.zeros([BLOCK], tl.int32)
    for back in tl.static_range(MOST):
        token = tl.load(text + last - back, mask=last >= back, other=-1)
        there = tl.load(text + place - back, mask=matches & (place >= back), other=-2)
        matches = matches & (there == token) & (place >= back)
        length += matches.to(tl.int32)
    return length


@triton.jit(do_not_specialize=["num_drafts", "least", "last_place", "text_stride"])
def match_rows(
    texts,
    seq_len,
    rows,
    drafts,
    num_drafts,
    least,
    last_place,
    text_stride,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """The longest earlier match of a text's end, of equals the latest, and what follows it."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    text = texts + slot * text_stride
    last = tl.minimum(tl.load(seq_len + slot), last_place).to(tl.int32)
    best = tl.full([BLOCK], -1, tl.int64)
    for first in range(0, last, BLOCK):
        place = first + tl.arange(0, BLOCK)
        length = match_lengths(text, place, last, MOST=MOST, BLOCK=BLOCK)
        score = (length.to(tl.int64) << 32) + place
        best = tl.maximum(best, tl.where((length >= least) & (place < last), score, -1))
    found = tl.max(best)
    at = (found & 0xFFFFFFFF).to(tl.int32)
    ahead = tl.arange(0, SIZE)
    mask = ahead < num_drafts
    place = at + 1 + ahead % tl.maximum(last - at, 1)
    token = tl.load(text + place, mask=mask & (found >= 0), other=-1)
    tl.store(drafts + row * num_drafts + ahead, token.to(tl.int64), mask=mask)
