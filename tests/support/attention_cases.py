"""Batches for tests of paged attention, and what comes out of them by the definition, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, SharedPrefix, TreeMask

LAYOUTS = ("dense", "layers_inside", "halves_outside", "heads_outside")


@dataclass(frozen=True, eq=False)
class Case:
    """A batch whose pages hold NaN wherever nothing was written."""

    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    rows: tuple[tuple[int, int], ...]
    """(q_len, kv_len) of each row."""
    contents: tuple[Tensor, ...]
    """Of each row, its keys and values as stored: float64 `[2, kv_len, num_kv_heads, head_dim]`."""


def make_case(
    rows: Sequence[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    layout: str = "dense",
    tree: bool = False,
    prefix: Sequence[tuple[int, int]] | None = None,
    table_dtype: torch.dtype = torch.int32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Case:
    """rows: (q_len, kv_len) of each; heads: of queries, of keys; prefix: (rows, shared tokens) of each group in order;
    tree: with random trees of drafted tokens.

    A row's contents depend on the seed and its lengths alone, but for what it shares.
    """
    num_heads, num_kv_heads = heads
    kv_dtype = kv_dtype or dtype
    random = np.random.default_rng(seed)
    pages_of = [-(-kv_len // page_size) for _, kv_len in rows]
    num_pages = sum(pages_of) + 5
    kv = _pages(layout, num_pages, page_size, num_kv_heads, head_dim, kv_dtype, device)
    # Entries past a row's pages are other rows' pages, and pages of NaN.
    table = random.integers(0, num_pages, (len(rows), max(pages_of) + 2))
    free = random.permutation(num_pages)
    contents: list[Tensor] = []
    for i, (q_len, kv_len) in enumerate(rows):
        table[i, : pages_of[i]], free = free[: pages_of[i]], free[pages_of[i] :]
        generator = torch.Generator().manual_seed(seed * 1000 + kv_len * 17 + q_len)
        made = torch.randn(2, kv_len, num_kv_heads, head_dim, generator=generator)
        contents.append(made.to(kv_dtype).to(device))
    shared = None
    if prefix is not None:
        starts = np.cumsum([0] + [size for size, _ in prefix])
        for start, (size, shared_len) in zip(starts.tolist(), prefix, strict=False):
            for i in range(start + 1, start + size):
                table[i, : shared_len // page_size] = table[start, : shared_len // page_size]
                _bytes(contents[i])[:, :shared_len] = _bytes(contents[start])[:, :shared_len]
        lens = np.array([shared_len for _, shared_len in prefix], dtype=np.int32)
        shared = SharedPrefix(starts.astype(np.int32), lens)
    for i, (_, kv_len) in enumerate(rows):
        places = torch.arange(kv_len)
        pages = torch.from_numpy(table[i])[places // page_size].to(device)
        slots = (places % page_size).to(device)
        for half in range(2):
            _bytes(kv)[pages, half, slots] = _bytes(contents[i][half])
    queries = [
        torch.randn(q_len, num_heads, head_dim, generator=torch.Generator().manual_seed(seed * 77 + kv_len + q_len))
        for q_len, kv_len in rows
    ]
    q_lens = np.array([q_len for q_len, _ in rows], dtype=np.int32)
    kv_lens = torch.tensor([kv_len for _, kv_len in rows], dtype=torch.int64, device=device)
    batch = AttentionBatch(
        q_lens,
        kv_lens,
        max(kv_len for _, kv_len in rows),
        torch.from_numpy(table).to(device, table_dtype),
        page_size,
        _random_trees(q_lens, random, device) if tree else None,
        shared,
    )
    q = torch.cat(queries).to(device, dtype)
    return Case(q, kv, batch, tuple(rows), tuple(part.double() for part in contents))


def plain_attention(case: Case, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Result float64 `[num_tokens, num_heads, head_dim]` and lse float64 `[num_tokens, num_heads]`, row by row."""
    num_tokens, num_heads, head_dim = case.q.shape
    out = torch.zeros(num_tokens, num_heads, head_dim, dtype=torch.float64, device=case.q.device)
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float64, device=case.q.device)
    start = 0
    for (q_len, kv_len), stored in zip(case.rows, case.contents, strict=True):
        tokens = slice(start, start + q_len)
        start += q_len
        if kv_len == 0 or q_len == 0:
            continue
        repeated = stored.repeat_interleave(num_heads // stored.shape[2], dim=2)
        keys, values = repeated[0] * spec.k_scale, repeated[1] * spec.v_scale
        scores = torch.einsum("qhd,khd->hqk", case.q[tokens].double(), keys) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores.masked_fill(~_visible(case.batch, tokens, q_len, kv_len, spec.window), -torch.inf)
        lse[tokens] = scores.logsumexp(-1).T
        if spec.sinks is not None:
            column = spec.sinks.double().view(-1, 1, 1).expand(-1, q_len, 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :kv_len]
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values)
    return out, lse


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of what is expected; NaN if anything is."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1e-30))


def _visible(batch: AttentionBatch, tokens: slice, q_len: int, kv_len: int, window: int | None) -> Tensor:
    """bool `[q_len, kv_len]`."""
    before = kv_len - q_len
    keys = torch.arange(kv_len, device=batch.kv_lens.device)
    steps = torch.arange(q_len, device=keys.device) if batch.tree is None else batch.tree.depths[tokens].long()
    distance = (before + steps)[:, None] - keys[None]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if batch.tree is not None:
        visible[:, before:] = batch.tree.visible[tokens, :q_len]
    return visible


def _random_trees(q_lens: np.ndarray, random: np.random.Generator, device: torch.device | str) -> TreeMask:
    num_tokens = int(q_lens.sum())
    # What is behind a row's own columns means nothing.
    visible = random.random((num_tokens, int(q_lens.max()) + 3)) < 0.5
    depths = np.zeros(num_tokens, dtype=np.int32)
    start = 0
    for q_len in q_lens.tolist():
        for j in range(q_len):
            token = start + j
            parent = int(random.integers(-1, j)) if j else -1
            visible[token, :q_len] = visible[start + parent, :q_len] if parent >= 0 else False
            visible[token, j] = True
            depths[token] = depths[start + parent] + 1 if parent >= 0 else 0
        start += q_len
    return TreeMask(torch.from_numpy(visible).to(device), torch.from_numpy(depths).to(device))


def _pages(
    layout: str,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """One layer's pages of NaN `[num_pages, 2, page_size, num_kv_heads, head_dim]`, in different orders in memory."""

    def filled(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan).to(dtype).to(device)

    if layout == "dense":
        return filled(num_pages, 2, page_size, num_kv_heads, head_dim)
    if layout == "layers_inside":
        return filled(num_pages, 3, 2, page_size, num_kv_heads, head_dim)[:, 1]
    if layout == "halves_outside":
        return filled(2, num_pages, page_size, num_kv_heads, head_dim).transpose(0, 1)
    assert layout == "heads_outside", layout
    return filled(num_pages, 2, num_kv_heads, page_size, head_dim).transpose(2, 3)


def _bytes(stored: Tensor) -> Tensor:
    """A view that any device can index, for 8-bit floats."""
    return stored.view(torch.uint8) if stored.element_size() == 1 else stored
