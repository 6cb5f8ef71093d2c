"""Lists of tiles that the device makes itself, for graphs that steps of different rows replay."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.attention_kernel import LIST_COLUMNS

_LIST_COLUMNS = tl.constexpr(LIST_COLUMNS)
_EMPTY_AT_ONCE = tl.constexpr(256)


def device_list(q_starts: Tensor, least: int, most: int, tokens: int, capacity: int) -> Tensor:
    """int32 `[capacity, LIST_COLUMNS]`: the tiles, of `tokens` tokens each, of all rows of `least` to `most` tokens.

    q_starts: int32 `[rows + 1]`; the last row has no context, and what is left of the list are empty tiles of that.
    There must be room for all.
    """
    num_rows = len(q_starts) - 1
    assert q_starts.is_contiguous()
    tiles = torch.empty((capacity, LIST_COLUMNS), dtype=torch.int32, device=q_starts.device)
    kernel: Any = list_tiles[(1,)]
    kernel(q_starts, tiles, num_rows, capacity, least, most, TOKENS=tokens, ROWS=triton.next_power_of_2(num_rows))
    return tiles


def common_lists(lens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Two lists `[tiles, LIST_COLUMNS]`: tiles of `tokens` rows' queries that go through the keys that rows have in
    common, and a tile for each row and the keys behind those.

    lens: int32 `[rows]`, as in `CommonPrefix`; every row adds one token.
    """
    num_rows = len(lens)
    assert lens.is_contiguous()
    num_tiles = -(-num_rows // tokens)
    shared, rest = torch.empty((num_tiles + num_rows, LIST_COLUMNS), dtype=torch.int32, device=lens.device).split(
        [num_tiles, num_rows]
    )
    kernel: Any = list_common[(1,)]
    kernel(lens, shared, rest, num_rows, num_tiles, TOKENS=tokens, ROWS=triton.next_power_of_2(num_rows))
    return shared, rest


@triton.jit
def _store_tile(entry, row, first, origin, length, border, mask):
    """An entry of a list for each place; the columns are those of LIST_COLUMNS."""
    tl.store(entry, row, mask=mask)
    tl.store(entry + 1, first, mask=mask)
    tl.store(entry + 2, origin, mask=mask)
    tl.store(entry + 3, length, mask=mask)
    tl.store(entry + 4, border, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_tiles"], do_not_specialize_on_alignment=["lens", "shared", "rest"])
def list_common(lens, shared, rest, num_rows, num_tiles, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """One program for all rows."""
    row = tl.arange(0, ROWS)
    length = tl.load(lens + row, mask=row < num_rows, other=0)
    nothing = tl.zeros([ROWS], tl.int32)
    _store_tile(rest + row * _LIST_COLUMNS, row, nothing, row, nothing + 1, length, row < num_rows)
    longest = nothing + tl.max(length, axis=0)
    _store_tile(
        shared + row * _LIST_COLUMNS, nothing, row * TOKENS, nothing, nothing + num_rows, longest, row < num_tiles
    )


@triton.jit(do_not_specialize=["num_rows", "capacity", "least", "most"], do_not_specialize_on_alignment=["q_starts"])
def list_tiles(q_starts, tiles, num_rows, capacity, least, most, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """One program: every row writes its tiles behind those of the rows before it."""
    row = tl.arange(0, ROWS)
    origin = tl.load(q_starts + row, mask=row < num_rows, other=0)
    length = tl.load(q_starts + row + 1, mask=row < num_rows, other=0) - origin
    count = tl.where((length >= least) & (length <= most), tl.cdiv(length, TOKENS), 0)
    place = tl.cumsum(count, axis=0) - count
    total = tl.sum(count, axis=0)
    for nth in range(tl.max(count, axis=0)):
        entry = tiles + (place + nth) * _LIST_COLUMNS
        mask = (nth < count) & (place + nth < capacity)
        none = tl.zeros([ROWS], tl.int32)
        _store_tile(entry, row, none + nth * TOKENS, origin, length, none, mask)
    nothing = tl.zeros([_EMPTY_AT_ONCE], tl.int32)
    for first in range(total, capacity, _EMPTY_AT_ONCE):
        index = first + tl.arange(0, _EMPTY_AT_ONCE)
        entry = tiles + index * _LIST_COLUMNS
        mask = index < capacity
        _store_tile(entry, nothing + num_rows - 1, nothing, nothing, nothing, nothing, mask)
