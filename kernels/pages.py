"""Page tables of a step's rows, and moving keys and values between places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KVLayers:
    """The pages of some layers, all of one dtype, shape and strides."""

    kv: tuple[Tensor, ...]
    """`[num_pages, 2, page_size, num_kv_heads, head_dim]` each, any strides."""
    addresses: Tensor
    """int64 [num_layers], on their device: where each begins. Graphs read it, so it must live as long as they do."""

    @classmethod
    def of(cls, kv: Sequence[Tensor]) -> KVLayers:
        """Of one layer at least."""
        assert len({(layer.dtype, layer.shape, layer.stride()) for layer in kv}) == 1, "layers must be alike"
        addresses = [layer.data_ptr() for layer in kv]
        return cls(tuple(kv), torch.tensor(addresses, dtype=torch.int64, device=kv[0].device))


def gather_pages(page_table: Tensor, rows: Tensor, kv_lens: Tensor, page_size: int, num_columns: int) -> Tensor:
    """The page tables of some slots, for kernels that must not meet an arbitrary page id.

    page_table: int32 `[slots, width]`; rows: int64 `[n]`, slots; kv_lens: int64 `[n]` tokens; num_columns: at most
    width. Returns int32 `[n, num_columns]`, dense: the pages of a row's kv_lens tokens, then zeros.
    """
    table = page_table[rows, :num_columns]
    used = (kv_lens + (page_size - 1)).div(page_size, rounding_mode="floor")
    return table.masked_fill(torch.arange(num_columns, device=table.device) >= used.unsqueeze(1), 0)


def pages_of(page_table: Tensor, rows: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Pages, int64 [n, m], that hold the places [n, m] of the rows (int64 [n]) of a page table.

    Places behind the end of the table are given the page in its last column.
    """
    columns = (places // page_size).clamp(max=page_table.shape[1] - 1)
    return page_table[rows.unsqueeze(1), columns].long()


def page_lists(page_table: Tensor, kv_lens: Tensor, page_size: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """A step's pages as one list, row after row (FlashInfer's format).

    page_table: int32 `[n, width]`; kv_lens: int64 `[n]` tokens; size: an upper bound of the pages of all rows.
    Returns int32 `[size]` page ids (zeros behind the last), int32 `[n + 1]` where each row's begin, and int32 `[n]`
    how many tokens a row's last page holds (0 for an empty row).
    """
    counts = (kv_lens + (page_size - 1)).div(page_size, rounding_mode="floor")
    starts = torch.zeros(len(kv_lens) + 1, dtype=torch.int64, device=kv_lens.device)
    torch.cumsum(counts, 0, out=starts[1:])
    place = torch.arange(size, device=kv_lens.device)
    row = torch.searchsorted(starts[1:], place, right=True).clamp(max=len(kv_lens) - 1)
    column = (place - starts[row]).clamp(max=page_table.shape[1] - 1)
    pages = torch.where(place < starts[-1], page_table[row, column], 0)
    last = torch.where(counts > 0, kv_lens - (counts - 1) * page_size, 0)
    return pages.to(torch.int32), starts.to(torch.int32), last.to(torch.int32)


def compact_kv(layers: KVLayers, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
    """Move the keys and values of accepted drafted tokens to where they belong, in every layer.

    sources, targets: int64 `[rows, width]`, locations `page * page_size + offset`; counts: int64 `[rows]`, how many of
    a row's places move. Within a row it is as if they moved one after the other: a later source is never an earlier
    target. No location is in two rows.
    """
    page_size = layers.kv[0].shape[2]
    # What does not move repeats the row's last move, or writes its first source onto itself where there is none: a mask
    # would have to be read back.
    column = torch.arange(sources.shape[1], device=sources.device).minimum((counts.unsqueeze(1) - 1).clamp(min=0))
    source = sources.gather(1, column)
    target = torch.where(counts.unsqueeze(1) > 0, targets.gather(1, column), source).flatten()
    source = source.flatten()
    from_page, from_offset, to_page, to_offset = (
        part for places in (source, target) for part in (places // page_size, places % page_size)
    )
    for kv in layers.kv:
        raw = kv.view(torch.uint8) if kv.dtype.itemsize == 1 else kv
        raw[to_page, :, to_offset] = raw[from_page, :, from_offset]
