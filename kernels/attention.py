"""Attention of a ragged batch over paged keys and values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class AttentionSpec:
    """What a layer's attention computes; the same at every step."""

    scale: float
    """Multiplies the scores."""
    window: int | None = None
    """A key is visible only if `query_pos - key_pos < window`."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)` after the scale (Gemma 2)."""
    sinks: Tensor | None = None
    """float32 `[num_heads]`: a score per head that takes its share of the softmax, and has no value (gpt-oss)."""
    k_scale: float = 1.0
    """A key is what its page holds times this; other than 1 for fp8 pages."""
    v_scale: float = 1.0
    """The same for values."""


@dataclass(frozen=True, eq=False)
class TreeMask:
    """Which of a step's own tokens see each other: those of a row are nodes of a tree of drafted tokens."""

    visible: Tensor
    """Device bool `[num_tokens, >= max(q_lens)]`: whether a token sees token j of its own row. It alone decides among a
    step's tokens, window or not; every token sees itself."""
    depths: Tensor
    """Device int32 `[num_tokens]`: a token's position is its row's context before the step plus this."""


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """Groups of neighbouring rows whose contexts begin with the same pages: a hint, results do not depend on it."""

    row_starts: np.ndarray
    """Host int32 `[groups + 1]`: group g is rows `row_starts[g]` to `row_starts[g + 1]`, at least one; all rows belong
    to some group, in order."""
    lens: np.ndarray
    """Host int32 `[groups]`, in tokens, multiples of page_size: that much of the page tables is the same in a group's
    rows, all of it in every row's context before the step. 0 where nothing is shared."""


@dataclass(frozen=True, eq=False)
class CommonPrefix:
    """Keys that the contexts of some rows begin with, for a graph that steps of different rows replay; every row adds
    one token. A hint as SharedPrefix is, but read on the device, and the rows need not be neighbours."""

    page_table: Tensor
    """Device int32 `[1, width]`: the pages of those keys, of which all rows that have them have the same."""
    lens: Tensor
    """Device int32 `[rows]`: how many of those keys a row's context begins with, step's token not included: the same
    multiple of page_size, or 0."""


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The rows of one step: row i adds `q_lens[i]` tokens at the end of a context of `kv_lens[i]` tokens.

    The tokens of a row are consecutive, rows come in order, so `num_tokens == q_lens.sum()`. All layers of a step share
    one object: an implementation may keep what it derives from the batch in `memo`.
    """

    q_lens: np.ndarray
    """Host int32 `[rows]`; 0 for a row that takes no part."""
    kv_lens: Tensor
    """Device int64 `[rows]`: context length in tokens, this step's tokens included; 0 for an empty row, whose result is
    zeros."""
    max_kv_len: int
    """Host upper bound of kv_lens, in tokens."""
    page_table: Tensor
    """Device int32 or int64 `[rows, >= ceil(max_kv_len / page_size)]`; entries past a row's pages are arbitrary ids."""
    page_size: int
    """Tokens per page."""
    tree: TreeMask | None = None
    """None: a token sees all of its row up to itself."""
    prefix: SharedPrefix | None = None
    common: CommonPrefix | None = None
    """Instead of prefix, in a graph."""
    host_kv_lens: np.ndarray | None = None
    """Host int `[rows]`: what kv_lens holds, where the host knows it before the device has run."""
    q_starts: Tensor | None = None
    """Device int32 `[rows + 1]`, for a graph that steps of different rows replay: row i has the tokens `q_starts[i]` to
    `q_starts[i + 1]`, and q_lens says no more than how many tokens and rows there are. The last row's kv_lens is 0."""
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
    empty: Tensor | None
    """bool `[rows, 1, 1, 1]`: rows without a context; None if there is none."""


# Bounds the gathered copy of keys and values (in tokens) of one dense call.
_MAX_GATHER_CPU = 1 << 15
_MAX_GATHER_DEVICE = 1 << 20
# Decode rows whose contexts are shorter than this share a call whatever their lengths.
_SMALL_CONTEXT = 256


def paged_attention(
    q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
) -> Tensor:
    """Causal grouped-query attention; keys and values, this step's included, are read from the pages.

    q: `[num_tokens, num_heads, head_dim]`; kv: one layer's pages `[num_pages, 2, page_size, num_kv_heads, head_dim]` of
    any strides. Returns `[num_tokens, num_heads, head_dim]`. Only positions that some query of the row may see are
    read, so other places may hold anything, NaN too. Into lse, float32 `[num_tokens, num_heads]`, goes the logarithm of
    the sum of the keys' exponentiated scores, without the sink's (-inf for an empty row): with it, results over parts
    of a context can be merged (`merge_states`).
    Source: Vaswani et al., 2017; grouped heads: Ainslie et al., "GQA", 2023.
    """
    if batch.q_starts is not None:
        batch = replace(batch, q_lens=batch.q_starts.diff().cpu().numpy(), q_starts=None)
    groups = _groups(batch, kv, spec.window)
    if len(groups) == 1 and groups[0].tokens is None and lse is None:
        return _dense(q, kv, groups[0], spec)[0]
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if lse is not None:
        lse.fill_(-torch.inf)
    for group in groups:
        tokens = slice(None) if group.tokens is None else group.tokens
        out[tokens], lse_piece = _dense(q[tokens], kv, group, spec, wants_lse=lse is not None)
        if lse is not None:
            assert lse_piece is not None
            lse[tokens] = lse_piece
    return out


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from attention over each; sinks count once, here.

    out_a, out_b: `[num_tokens, num_heads, head_dim]`, made without sinks; lse_a, lse_b: float32 `[num_tokens,
    num_heads]`, -inf for a set without keys; sinks: float32 `[num_heads]`. Returns the merged result and its lse
    (without the sinks). Source: Dao et al., "FlashAttention", 2022 (the rescaling of partial softmaxes).
    """
    lse = torch.logaddexp(lse_a, lse_b)
    total = lse if sinks is None else torch.logaddexp(lse, sinks)
    parts = ((out_a, lse_a), (out_b, lse_b))
    wide = sum(
        torch.where(part_lse.isneginf(), 0.0, (part_lse - total).exp()).unsqueeze(-1) * part.float()
        for part, part_lse in parts
    )
    assert isinstance(wide, Tensor)
    return wide.to(out_a.dtype), lse


def _dense(
    q: Tensor, kv: Tensor, group: _Group, spec: AttentionSpec, wants_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    rows = num_tokens // group.q_len
    gathered = _gather(kv, group.kv_index)
    keys, values = gathered.view(2, rows, -1, num_kv_heads, head_dim).transpose(2, 3).unbind(0)
    queries = q.reshape(rows, group.q_len, num_heads, head_dim).transpose(1, 2)
    if keys.dtype != queries.dtype:
        keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    grouped = num_heads != num_kv_heads
    if grouped and q.device.type != "cpu":
        # The fused CUDA kernels that take a mask do not group heads themselves.
        keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
        grouped = False
    lse = None
    scale = spec.scale * spec.k_scale
    if spec.softcap is None and spec.sinks is None and not wants_lse:
        mask = group.mask
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        out, lse = _explicit(queries, keys, values, group.mask, scale, spec)
        lse = lse.transpose(1, 2).reshape(num_tokens, num_heads)
    if spec.v_scale != 1.0:
        out = out * spec.v_scale
    if group.empty is not None:
        out = out.masked_fill(group.empty, 0.0)
    return out.transpose(1, 2).reshape(num_tokens, num_heads, head_dim), lse


def _explicit(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Result `[rows, num_heads, q_len, head_dim]` and lse float32 `[rows, num_heads, q_len]`, scores in float32."""
    group_size = queries.shape[1] // keys.shape[1]
    keys, values = (part.float().repeat_interleave(group_size, dim=1) for part in (keys, values))
    scores = queries.float() @ keys.transpose(-1, -2) * scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    lse = scores.logsumexp(dim=-1)
    total = lse if spec.sinks is None else torch.logaddexp(lse, spec.sinks.view(1, -1, 1))
    weights = (scores - total.unsqueeze(-1)).exp()
    return (weights @ values).to(queries.dtype), lse


def _gather(kv: Tensor, index: Tensor) -> Tensor:
    if kv.dtype.itemsize > 1:
        return _token_rows(kv).index_select(0, index)
    # Not every device indexes 8-bit floats.
    return _token_rows(kv.view(torch.uint8)).index_select(0, index).view(kv.dtype)


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
    some = q_lens > 0
    if exact:
        kv_lens = batch.kv_lens.numpy()
        some &= kv_lens > 0
        # Contexts within a factor of two share a call, so padding at most doubles the work.
        sizes = np.ceil(np.log2(np.maximum(kv_lens, _SMALL_CONTEXT))).astype(np.int64)
    else:
        kv_lens = np.full(len(q_lens), batch.max_kv_len, dtype=np.int64)
        sizes = np.zeros(len(q_lens), dtype=np.int64)
    limit = _MAX_GATHER_CPU if exact else _MAX_GATHER_DEVICE
    calls: list[tuple[np.ndarray, int, int]] = []
    keys = q_lens.astype(np.int64) * 64 + sizes
    for value in np.unique(keys[some]):
        rows = np.flatnonzero(some & (keys == value))
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
    if len(rows) < len(batch.q_lens) or batch.tree is not None:
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
    # Lengths on a device are not known here; on the CPU empty rows have been left out.
    empty = None if device.type == "cpu" else (kv_lens == 0).view(-1, 1, 1, 1)
    mask = _mask(ends, key_pos, q_len, window, None if tokens is None else tokens.view(-1, q_len), batch.tree)
    return _Group(q_len, row_idx, tokens, kv_index, mask.unsqueeze(1), empty)


def _mask(
    ends: Tensor, key_pos: Tensor, q_len: int, window: int | None, tokens: Tensor | None, tree: TreeMask | None
) -> Tensor:
    """bool `[rows, q_len, span]`; ends: `[rows, 1]`; key_pos: `[rows, span]`; tokens: `[rows, q_len]`."""
    own = key_pos - (ends - q_len)
    if tree is None:
        query_pos = ends - q_len + torch.arange(q_len, device=ends.device)
    else:
        assert tokens is not None
        query_pos = ends - q_len + tree.depths[tokens]
    distance = query_pos.unsqueeze(2) - key_pos.unsqueeze(1)
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if tree is not None:
        visible = tree.visible[tokens]
        index = own.clamp(0, q_len - 1).unsqueeze(1).expand(-1, q_len, -1)
        mask = torch.where(own.unsqueeze(1) >= 0, visible.gather(2, index), mask)
    # Places before and after a short row's context stand for nothing.
    return mask & (own < q_len).unsqueeze(1)
