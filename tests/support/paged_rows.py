"""Rows of steps for tests of the CPU kernels' attention."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels import attention as reference
from kernels.attention import AttentionBatch, AttentionSpec, TreeMask
from kernels.cpu import attention


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    dim: int


def _stored(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads as they are in pages of a dtype, and what they stand for."""
    if dtype != torch.int8:
        return x.to(dtype), x.to(dtype).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    codes = (x / scale).round()
    return torch.cat((codes.to(torch.int8), scale.view(torch.int8)), -1), codes * scale


class Context:
    """One row's queries, keys and values by position; the same for the same seed."""

    def __init__(self, shape: Shape, length: int, seed: int, dtype: torch.dtype) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.length = length
        self.queries = torch.randn(length, shape.heads, shape.dim, generator=gen)
        self.stored, self.values = _stored(torch.randn(length, 2, shape.kv_heads, shape.dim, generator=gen), dtype)

    def at(self, positions: Sequence[int]) -> Context:
        """What is at these positions, one after the other."""
        index, chosen = torch.tensor(positions), copy(self)
        chosen.length = len(positions)
        chosen.queries, chosen.stored, chosen.values = self.queries[index], self.stored[index], self.values[index]
        return chosen


class Step:
    """Rows (context, query length, context length so far) of one step, paged at random among pages of NaN."""

    def __init__(
        self,
        rows: Sequence[tuple[Context, int, int]],
        page_size: int,
        *,
        window: int | None = None,
        tree: TreeMask | None = None,
    ) -> None:
        gen = torch.Generator().manual_seed(len(rows) * 100 + page_size)
        first = rows[0][0]
        widths = [-(-length // page_size) for _, _, length in rows]
        num_pages = sum(widths) + 3
        # int8 scales of all ones are NaN.
        hole = -1 if first.stored.dtype == torch.int8 else torch.nan
        self.kv = torch.full((num_pages, 2, page_size, *first.stored.shape[2:]), hole, dtype=first.stored.dtype)
        self.plain = torch.full((num_pages, 2, page_size, *first.values.shape[2:]), torch.nan)
        self.window = window
        free = torch.randperm(num_pages, generator=gen)
        table = torch.randint(0, num_pages, (len(rows), max(widths) + 2), generator=gen)
        for i, (context, q_len, length) in enumerate(rows):
            table[i, : widths[i]], free = free[: widths[i]], free[widths[i] :]
            unseen = 0 if window is None else max(0, length - q_len - window + 1)
            pos = torch.arange(unseen, length)
            pages, offsets = table[i, pos // page_size], pos % page_size
            self.kv[pages, :, offsets] = context.stored[unseen:length]
            self.plain[pages, :, offsets] = context.values[unseen:length]
        self.q = torch.cat([context.queries[length - q_len : length] for context, q_len, length in rows])
        q_lens = np.array([q_len for _, q_len, _ in rows], dtype=np.int32)
        kv_lens = torch.tensor([length for _, _, length in rows])
        self.batch = AttentionBatch(q_lens, kv_lens, int(kv_lens.max()), table.int(), page_size, tree)

    def run(self, kv: Tensor | None = None, q: Tensor | None = None) -> Tensor:
        scale = self.q.shape[-1] ** -0.5
        pages = self.kv if kv is None else kv
        return attention.paged_attention(
            self.q if q is None else q, pages, self.batch, AttentionSpec(scale, self.window)
        )

    def expected(self) -> Tensor:
        return reference.paged_attention(
            self.q, self.plain, self.batch, AttentionSpec(self.q.shape[-1] ** -0.5, self.window)
        )
