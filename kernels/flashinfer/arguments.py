"""A step's rows in FlashInfer's terms; each conversion is done once a step and kept in the batch's memo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.cuda.context import is_capturing

PageLists = Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
"""The signature of `kernels.pages.page_lists`."""

_WORD = 32


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """What the kernels read that find their work on the device."""

    page_table: Tensor
    """int32 `[rows, width]`, dense."""
    kv_lens: Tensor
    """int32 `[rows]`, tokens."""


@dataclass(frozen=True, eq=False)
class HostRows:
    """What is planned with: int32 on the host but for the pages."""

    q_starts: Tensor
    """`[rows + 1]`: where a row's tokens begin."""
    page_starts: Tensor
    """`[rows + 1]`: where a row's pages begin in `pages`."""
    last_page_lens: Tensor
    """`[rows]`: tokens in a row's last page, 0 for an empty row."""
    pages: Tensor
    """Device int32 `[page_starts[-1]]`."""
    empty_tokens: Tensor | None
    """Device bool `[num_tokens]`: whether a token's row has no context; None if all rows have one."""


def device_rows(batch: AttentionBatch) -> DeviceRows:
    """Waits for nothing; copies only what is not int32 and dense. In a graph that is captured, it copies anew, once, so
    that the graph does.
    """
    key = (__name__, "device_rows", is_capturing(batch.kv_lens.device))
    known = batch.memo.get(key)
    if not isinstance(known, DeviceRows):
        known = DeviceRows(batch.page_table.to(torch.int32).contiguous(), batch.kv_lens.to(torch.int32))
        batch.memo[key] = known
    return known


def host_rows(batch: AttentionBatch, page_lists: PageLists) -> HostRows:
    """Waits for the device unless the batch has `host_kv_lens`."""
    key = (__name__, "host_rows")
    known = batch.memo.get(key)
    if not isinstance(known, HostRows):
        known = _host_rows(batch, page_lists)
        batch.memo[key] = known
    return known


def packed_mask(batch: AttentionBatch, q_len: int) -> Tensor:
    """Which of a row's own tokens see each other: int32 `[rows, q_len, ceil(q_len / 32)]`, a bit per token, from the
    lowest of the first word on.
    """
    key = (__name__, "packed_mask", is_capturing(batch.kv_lens.device))
    known = batch.memo.get(key)
    if not isinstance(known, Tensor):
        known = _packed_mask(batch, q_len)
        batch.memo[key] = known
    return known


def _host_rows(batch: AttentionBatch, page_lists: PageLists) -> HostRows:
    lens = batch.kv_lens.cpu().numpy() if batch.host_kv_lens is None else np.asarray(batch.host_kv_lens)
    counts = -(-lens // batch.page_size)
    last = np.where(counts > 0, lens - (counts - 1) * batch.page_size, 0)
    page_starts = _starts(counts)
    pages, _, _ = page_lists(batch.page_table, batch.kv_lens, batch.page_size, int(page_starts[-1]))
    empty = None
    if (lens == 0).any():
        empty = torch.from_numpy(np.repeat(lens == 0, batch.q_lens)).to(batch.kv_lens.device)
    return HostRows(_starts(batch.q_lens), page_starts, _host_tensor(last), pages, empty)


def _starts(counts: np.ndarray) -> Tensor:
    return _host_tensor(np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64))))


def _host_tensor(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _packed_mask(batch: AttentionBatch, q_len: int) -> Tensor:
    rows, device = len(batch.q_lens), batch.kv_lens.device
    if batch.tree is None:
        visible = torch.ones(q_len, q_len, dtype=torch.bool, device=device).tril().expand(rows, -1, -1)
    else:
        visible = batch.tree.visible[:, :q_len].reshape(rows, q_len, q_len)
    words = -(-q_len // _WORD)
    bits = F.pad(visible, (0, words * _WORD - q_len)).view(rows, q_len, words, _WORD)
    # The highest bit counts negative, so no sum leaves int32.
    values = torch.ones(_WORD, dtype=torch.int32, device=device) << torch.arange(
        _WORD, device=device, dtype=torch.int32
    )
    return (bits * values).sum(dim=-1, dtype=torch.int32)
