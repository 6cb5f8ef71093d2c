"""Dynamic trees of drafts, in Triton; see kernels/beams.py for what the functions do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import beams
from kernels.beams import Candidates, Frontier
from kernels.speculative import Drafts

VOCAB_BLOCK = 4096
"""Columns that a program looks at at a time."""
MOST_NODES = 64
"""Of a frontier; larger ones are made by the reference."""
MOST_CANDIDATES = 1024
"""Of a tree."""
LEAST = tl.constexpr(-(1 << 63))


def likeliest(logits: Tensor, width: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """`kernels.beams.likeliest`, in one launch; of equals the first."""
    num_rows, vocab = logits.shape
    log_probs = torch.empty(num_rows, width, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, width, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return log_probs, ids
    assert logits.stride(1) == 1, "rows must be dense"
    kernel: Any = likeliest_rows[(num_rows,)]
    block = min(triton.next_power_of_2(vocab), VOCAB_BLOCK)
    kernel(
        logits,
        offsets,
        log_probs,
        ids,
        vocab,
        logits.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=max(block // 512, 1),
    )
    return log_probs, ids


def grow(
    log_probs: Tensor, ids: Tensor, candidates: Candidates, last: Tensor, before: Frontier | None, step: int
) -> Frontier:
    """`kernels.beams.grow`, in one launch."""
    width, num_rows, device = candidates.width, len(last), ids.device
    size, num = 1 + (step + 1) * width, width * (width if step else 1)
    if size > MOST_NODES or num_rows == 0:
        return beams.grow(log_probs, ids, candidates, last, before, step)
    tokens = torch.empty(num_rows, size, dtype=torch.int64, device=device)
    parents = torch.empty(num_rows, size - 1, dtype=torch.int64, device=device)
    visible = torch.empty(num_rows * size, size, dtype=torch.bool, device=device)
    depths = torch.empty(num_rows * size, dtype=torch.int32, device=device)
    assert log_probs.is_contiguous() and ids.is_contiguous() and last.is_contiguous(), "must be dense"
    kernel: Any = grow_rows[(num_rows,)]
    kernel(
        log_probs,
        ids,
        candidates.scores,
        candidates.tokens,
        candidates.extended,
        last,
        None if before is None else before.tokens,
        None if before is None else before.parents,
        None if before is None else before.visible.view(torch.uint8),
        tokens,
        parents,
        visible.view(torch.uint8),
        depths,
        candidates.first(step),
        candidates.scores.shape[1],
        candidates.extended.shape[1],
        step,
        size,
        num,
        WIDTH=width,
        SIZE=triton.next_power_of_2(num),
        NODES=triton.next_power_of_2(size),
        num_warps=1 if size <= 16 else 4,
    )
    return Frontier(tokens, parents, visible, depths)


def best(candidates: Candidates, num: int) -> Drafts:
    """`kernels.beams.best`, in one launch."""
    num_rows, total = candidates.scores.shape
    if total > MOST_CANDIDATES or num_rows == 0:
        return beams.best(candidates, num)
    tokens, parents = torch.empty(2, num_rows, num, dtype=torch.int64, device=candidates.tokens.device).unbind(0)
    kernel: Any = best_rows[(num_rows,)]
    kernel(
        candidates.scores,
        candidates.tokens,
        candidates.extended,
        tokens,
        parents,
        num,
        total,
        candidates.extended.shape[1],
        WIDTH=candidates.width,
        SIZE=triton.next_power_of_2(total),
        num_warps=1 if total <= 256 else 4,
    )
    return Drafts(tokens, parents)


def features_before(own: Tensor, rows: Tensor | None, features: Tensor, parents: Tensor | None, size: int) -> Tensor:
    """`kernels.beams.features_before`, in one launch."""
    num_rows, num, hidden = features.shape
    out = torch.empty(num_rows * size, hidden, dtype=own.dtype, device=own.device)
    if out.numel() == 0:
        return out
    assert features.is_contiguous() and own.stride(1) == 1 and (parents is None or parents.is_contiguous()), "dense"
    assert rows is None or rows.is_contiguous()
    kernel: Any = before_nodes[(num_rows * size,)]
    kernel(own, rows, features, parents, out, own.stride(0), num, size, HIDDEN=hidden, **_lanes(hidden))
    return out


def keep_features(
    features: Tensor,
    way: Tensor | None,
    counts: Tensor | None,
    rows: Tensor,
    locations: Tensor,
    page_size: int,
    of_slots: Tensor,
    of_pages: Tensor,
) -> None:
    """`kernels.beams.keep_features`, in one launch; what is nobody's stays as it is."""
    num_rows, size, hidden = features.shape
    if features.numel() == 0:
        return
    vectors = (features, way, rows, locations, of_slots, of_pages)
    assert all(vector is None or vector.is_contiguous() for vector in vectors), "must be dense"
    kernel: Any = keep_nodes[(num_rows * size,)]
    kernel(
        features,
        way,
        counts,
        rows,
        locations,
        of_slots,
        of_pages,
        size,
        page_size,
        0 if counts is None else counts.stride(0),
        HIDDEN=hidden,
        **_lanes(hidden),
    )


def _lanes(hidden: int) -> dict[str, int]:
    block = min(triton.next_power_of_2(hidden), 4096)
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 8)}


@triton.jit
def _keys(values, index, mask):
    """int64: in the order of float32 values, of equals the first; LEAST where not mask."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index).to(tl.int64)
    return tl.where(mask, keys, LEAST)


@triton.jit
def _index_of(key):
    return 0x7FFFFFFF - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit(do_not_specialize=["vocab"])
def likeliest_rows(logits, offsets, log_probs, ids, vocab, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """One row: its logarithm of the sum of exponentials, then its largest, each time by a look at all columns."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    column = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for first in range(0, vocab, BLOCK):
        value = tl.load(logits + first + column, mask=first + column < vocab, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    top = tl.max(largest)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, vocab, BLOCK):
        value = tl.load(logits + first + column, mask=first + column < vocab, other=-float("inf")).to(tl.float32)
        total += tl.exp(value - top)
    norm = top + tl.log(tl.sum(total))
    bound = tl.full([], (1 << 63) - 1, tl.int64)
    for i in tl.static_range(WIDTH):
        found = tl.full([BLOCK], LEAST, tl.int64)
        for first in range(0, vocab, BLOCK):
            inside = first + column < vocab
            value = tl.load(logits + first + column, mask=inside, other=0).to(tl.float32)
            keys = _keys(value, first + column, inside)
            found = tl.maximum(found, tl.where(keys < bound, keys, LEAST))
        bound = tl.max(found)
        index = _index_of(bound)
        token = index.to(tl.int64)
        if offsets is not None:
            token += tl.load(offsets + index)
        tl.store(log_probs + row * WIDTH + i, tl.load(logits + index).to(tl.float32) - norm)
        tl.store(ids + row * WIDTH + i, token)


@triton.jit(do_not_specialize=["first", "capacity", "num_extended", "step", "size", "num"])
def grow_rows(
    log_probs,
    ids,
    scores,
    tokens,
    extended,
    last,
    old_tokens,
    old_parents,
    old_visible,
    out_tokens,
    out_parents,
    out_visible,
    out_depths,
    first,
    capacity,
    num_extended,
    step,
    size,
    num,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    NODES: tl.constexpr,
):
    """One row. SIZE, NODES: powers of two, at least num candidates and size nodes."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < num
    score = tl.load(log_probs + row * num + index, mask=inside, other=-float("inf"))
    token = tl.load(ids + row * num + index, mask=inside, other=0)
    node = tl.arange(0, NODES)
    old = size - WIDTH
    row_out = row * size
    if old_tokens is None:
        tl.store(out_tokens + row_out, tl.load(last + row))
        tl.store(out_visible + row_out * size + node, (node == 0).to(tl.uint8), mask=node < size)
    else:
        came = tl.load(extended + row * num_extended + (step - 1) * WIDTH + index // WIDTH, mask=inside, other=0)
        score += tl.load(scores + row * capacity + came, mask=inside, other=0)
        kept = tl.load(old_tokens + row * old + node, mask=node < old, other=0)
        tl.store(out_tokens + row_out + node, kept, mask=node < old)
        parent = tl.load(old_parents + row * (old - 1) + node, mask=node < old - 1, other=0)
        tl.store(out_parents + row * (size - 1) + node, parent, mask=node < old - 1)
        seer, seen = node[:, None], node[None, :]
        sees = tl.load(old_visible + (row * old + seer) * old + seen, mask=(seer < old) & (seen < old), other=0)
        tl.store(out_visible + (row_out + seer) * size + seen, sees, mask=(seer < old) & (seen < size))
    tl.store(scores + row * capacity + first + index, score, mask=inside)
    tl.store(tokens + row * capacity + first + index, token, mask=inside)
    tl.store(out_depths + row_out + node, (node + (WIDTH - 1)) // WIDTH, mask=node < size)
    keys = _keys(score, index, inside)
    for i in tl.static_range(WIDTH):
        key = tl.max(keys)
        keys = tl.where(keys == key, LEAST, keys)
        chosen = _index_of(key)
        place = old + i
        tl.store(extended + row * num_extended + step * WIDTH + i, (first + chosen).to(tl.int64))
        tl.store(out_tokens + row_out + place, tl.sum(tl.where(index == chosen, token, 0)))
        if old_tokens is None:
            parent_node = 0
            sees = (node == 0).to(tl.uint8)
        else:
            parent_node = 1 + (step - 1) * WIDTH + chosen // WIDTH
            sees = tl.load(old_visible + (row * old + parent_node) * old + node, mask=node < old, other=0)
        tl.store(out_parents + row * (size - 1) + place - 1, tl.zeros([], tl.int64) + parent_node)
        sees = tl.where(node == place, 1, sees).to(tl.uint8)
        tl.store(out_visible + (row_out + place) * size + node, sees, mask=node < size)


@triton.jit(do_not_specialize=["num", "total", "num_extended"])
def best_rows(
    scores, tokens, extended, out_tokens, out_parents, num, total, num_extended, WIDTH: tl.constexpr, SIZE: tl.constexpr
):
    """One row. SIZE: a power of two, at least total."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SIZE)
    inside = index < total
    keys = _keys(tl.load(scores + row * total + index, mask=inside, other=0), index, inside)
    kept = tl.zeros([SIZE], tl.int32)
    for _ in range(num):
        key = tl.max(keys)
        kept = tl.where(keys == key, 1, kept)
        keys = tl.where(keys == key, LEAST, keys)
    number = tl.cumsum(kept)
    token = tl.load(tokens + row * total + index, mask=inside, other=0)
    behind = tl.maximum(index - WIDTH, 0)
    place = behind // (WIDTH * WIDTH) * WIDTH + behind % (WIDTH * WIDTH) // WIDTH
    came = tl.load(extended + row * num_extended + place, mask=inside & (index >= WIDTH), other=-1)
    for i in range(num):
        is_it = (kept == 1) & (number == i + 1)
        parent = tl.sum(tl.where(is_it, came, 0))
        tl.store(out_tokens + row * num + i, tl.sum(tl.where(is_it, token, 0)))
        tl.store(out_parents + row * num + i, tl.sum(tl.where(index == parent, number, 0)).to(tl.int64))


@triton.jit(do_not_specialize=["num", "size"])
def before_nodes(own, rows, features, parents, out, own_stride, num, size, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """One node."""
    node = tl.program_id(0).to(tl.int64)
    row, j = node // size, node % size
    if j == 0:
        slot = row
        if rows is not None:
            slot = tl.load(rows + row)
        source = own + slot * own_stride
    else:
        parent = j - 1
        if parents is not None:
            parent = tl.load(parents + row * (size - 1) + j - 1)
        source = features + (row * num + parent) * HIDDEN
    for first in tl.static_range(0, HIDDEN, BLOCK):
        element = first + tl.arange(0, BLOCK)
        value = tl.load(source + element, mask=element < HIDDEN)
        tl.store(out + node * HIDDEN + element, value, mask=element < HIDDEN)


@triton.jit(
    do_not_specialize=["size", "page_size", "count_stride"], do_not_specialize_on_alignment=["counts", "locations"]
)
def keep_nodes(
    features,
    way,
    counts,
    rows,
    locations,
    of_slots,
    of_pages,
    size,
    page_size,
    count_stride,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of a row."""
    step = tl.program_id(0).to(tl.int64)
    row, j = step // size, step % size
    count = size
    if counts is not None:
        count = tl.load(counts + row * count_stride)
    node = j
    if way is not None:
        node = tl.load(way + step)
    slot = tl.load(rows + row)
    location = tl.load(locations + step)
    is_last = j == count - 1
    is_end = (j < count) & (location % page_size == page_size - 1)
    if is_last | is_end:
        for first in tl.static_range(0, HIDDEN, BLOCK):
            element = first + tl.arange(0, BLOCK)
            value = tl.load(features + (row * size + node) * HIDDEN + element, mask=element < HIDDEN)
            tl.store(of_slots + slot * HIDDEN + element, value, mask=(element < HIDDEN) & is_last)
            page = location // page_size
            tl.store(of_pages + page * HIDDEN + element, value, mask=(element < HIDDEN) & is_end)
