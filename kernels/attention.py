"""Attention of a ragged batch over paged keys and values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The rows of one step: row i adds `q_lens[i]` tokens at the end of a context of `kv_lens[i]` tokens.

    The tokens of a row are consecutive, rows come in order, so `num_tokens == q_lens.sum()`. All layers of a step share
    one object: an implementation may keep what it derives from the batch in `memo`.
    """

    q_lens: np.ndarray
    """Host int32 `[rows]`, each at least 1."""
    kv_lens: Tensor
    """Device int64 `[rows]`: context length in tokens, this step's tokens included."""
    max_kv_len: int
    """Host upper bound of kv_lens, in tokens."""
    page_table: Tensor
    """Device int32 or int64 `[rows, >= ceil(max_kv_len / page_size)]`; entries past a row's pages are arbitrary ids."""
    page_size: int
    """Tokens per page."""
    memo: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)
    """Owned by the attention implementation; lives as long as the step."""


@dataclass(frozen=True)
class _Group:
    """Rows of one query length and similar context, run as one dense call. None for an index means everything."""

    q_len: int
    rows: Tensor | None
    tokens: Tensor | None
    kv_index: Tensor
    """int64 `[2 * rows * span]`: places of keys, then of values, in units of the token stride."""
    mask: Tensor
    """bool `[rows, 1, q_len, span]`: True where a query may see a key."""


# Bounds the gathered copy of keys and values (in tokens) of one dense call.
_MAX_GATHER_CPU = 1 << 15
_MAX_GATHER_DEVICE = 1 << 20
# Decode rows whose contexts are shorter than this share a call whatever their lengths.
_SMALL_CONTEXT = 256


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, window: int | None) -> Tensor:
    """Causal grouped-query attention; keys and values, this step's included, are read from the pages.

    q: `[num_tokens, num_heads, head_dim]`; kv: one layer's pages `[num_pages, 2, page_size, num_kv_heads, head_dim]` of
    any strides; scale multiplies the scores; with a window of w tokens a key is visible if
    `query_pos - key_pos < w`. Returns `[num_tokens, num_heads, head_dim]`. Only positions that some query of the row
    may see are read, so other places may hold anything, NaN too.
    Source: Vaswani et al., 2017; grouped heads: Ainslie et al., "GQA", 2023.
    """
    groups = _groups(batch, kv, window)
    if len(groups) == 1 and groups[0].tokens is None:
        return _dense(q, kv, groups[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for group in groups:
        assert group.tokens is not None
        out.index_copy_(0, group.tokens, _dense(q.index_select(0, group.tokens), kv, group, scale))
    return out


def _dense(q: Tensor, kv: Tensor, group: _Group, scale: float) -> Tensor:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    rows = num_tokens // group.q_len
    gathered = _token_rows(kv).index_select(0, group.kv_index)
    keys, values = gathered.view(2, rows, -1, num_kv_heads, head_dim).transpose(2, 3).unbind(0)
    queries = q.view(rows, group.q_len, num_heads, head_dim).transpose(1, 2)
    if keys.dtype != queries.dtype:
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    grouped = num_heads != num_kv_heads
    if grouped and q.device.type != "cpu":
        # The fused CUDA kernels that take a mask do not group heads themselves.
        keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
        grouped = False
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)


def _token_rows(kv: Tensor) -> Tensor:
    """The pages as `[places, num_kv_heads, head_dim]` in steps of the token stride; places may overlap in memory."""
    step = kv.stride(2)
    last = (kv.shape[0] - 1) * kv.stride(0) + kv.stride(1) + (kv.shape[2] - 1) * step
    return kv.as_strided((last // step + 1, kv.shape[3], kv.shape[4]), (step, kv.stride(3), kv.stride(4)))


def _groups(batch: AttentionBatch, kv: Tensor, window: int | None) -> tuple[_Group, ...]:
    strides = kv.stride()[:3]
    key = (window, strides)
    known = batch.memo.get(key)
    if isinstance(known, tuple):
        return known
    if strides[0] % strides[2] or strides[1] % strides[2]:
        raise ValueError(f"page and key/value strides must be multiples of the token stride, got {strides}")
    calls = _split_rows(batch, exact=batch.kv_lens.device.type == "cpu")
    groups = tuple(_prepare(batch, rows, q_len, ctx, strides, window) for rows, q_len, ctx in calls)
    batch.memo[key] = groups
    return groups


def _split_rows(batch: AttentionBatch, exact: bool) -> list[tuple[np.ndarray, int, int]]:
    """(row numbers, query length, bound of the context) of each dense call; loops over groups, never over rows.

    exact: kv_lens may be read here; on a device that would wait for the step before.
    """
    q_lens = np.asarray(batch.q_lens)
    if exact:
        kv_lens = batch.kv_lens.numpy()
        # Contexts within a factor of two share a call, so padding at most doubles the work.
        sizes = np.ceil(np.log2(np.maximum(kv_lens, _SMALL_CONTEXT))).astype(np.int64)
    else:
        kv_lens = np.full(len(q_lens), batch.max_kv_len, dtype=np.int64)
        sizes = np.zeros(len(q_lens), dtype=np.int64)
    limit = _MAX_GATHER_CPU if exact else _MAX_GATHER_DEVICE
    calls: list[tuple[np.ndarray, int, int]] = []
    keys = q_lens.astype(np.int64) * 64 + sizes
    for value in np.unique(keys):
        rows = np.flatnonzero(keys == value)
        ctx = int(kv_lens[rows].max())
        step = max(1, limit // max(ctx, 1))
        calls += [(rows[i : i + step], int(value) // 64, ctx) for i in range(0, len(rows), step)]
    return calls


def _prepare(
    batch: AttentionBatch,
    rows: np.ndarray,
    q_len: int,
    ctx: int,
    strides: tuple[int, ...],
    window: int | None,
) -> _Group:
    device = batch.kv_lens.device
    row_idx: Tensor | None = None
    tokens: Tensor | None = None
    kv_lens, page_table = batch.kv_lens, batch.page_table
    if len(rows) < len(batch.q_lens):
        starts = np.cumsum(batch.q_lens, dtype=np.int64) - batch.q_lens
        row_idx = torch.from_numpy(rows).to(device, non_blocking=True)
        flat = (starts[rows, None] + np.arange(q_len)).ravel()
        tokens = torch.from_numpy(flat).to(device, non_blocking=True)
        kv_lens, page_table = kv_lens.index_select(0, row_idx), page_table.index_select(0, row_idx)
    span = ctx if window is None else min(ctx, window + q_len - 1)
    ends = kv_lens.unsqueeze(1)
    key_pos = (ends - span).clamp_(min=0) + torch.arange(span, device=device)
    # Places outside the context are redirected to its last token: always written, and masked out below.
    read_pos = torch.minimum(key_pos, ends - 1).clamp_(min=0)
    page_idx = read_pos.div(batch.page_size, rounding_mode="floor")
    pages = page_table.gather(1, page_idx).long()
    places = pages * (strides[0] // strides[2]) + (read_pos - page_idx * batch.page_size)
    kv_index = torch.stack((places, places + strides[1] // strides[2])).flatten()
    query_pos = ends - q_len + torch.arange(q_len, device=device)
    distance = query_pos.unsqueeze(2) - key_pos.unsqueeze(1)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    return _Group(q_len, row_idx, tokens, kv_index, mask.unsqueeze(1))
