"""Steps with pages of random order, and the reference's answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, TreeMask


@dataclass(frozen=True)
class Step:
    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    spec: AttentionSpec


def make_step(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: torch.dtype = torch.float16,
    kv_dtype: torch.dtype | None = None,
    tree: TreeMask | None = None,
    spare_columns: int = 1,
    host_kv_lens: bool = False,
    poison: float = math.nan,
    seed: int = 0,
    device: torch.device | str = "cpu",
    **spec: object,
) -> Step:
    """A step over pages whose places past a row's context hold `poison`, as do those of no row."""
    rng = torch.Generator().manual_seed(seed)
    lens = np.asarray(kv_lens, dtype=np.int64)
    counts = -(-lens // page_size)
    width = int(counts.max()) + spare_columns
    total = int(counts.sum()) + 2
    ids = torch.randperm(total, generator=rng)
    kv = torch.full((total, 2, page_size, num_kv_heads, head_dim), poison)
    # Entries past a row's pages are arbitrary.
    table = torch.full((len(lens), width), total - 1, dtype=torch.int32)
    taken = 0
    for row, (length, count) in enumerate(zip(lens.tolist(), counts.tolist(), strict=True)):
        table[row, :count] = ids[taken : taken + count]
        values = torch.randn(2, count * page_size, num_kv_heads, head_dim, generator=rng)
        values[:, length:] = poison
        for i, page in enumerate(ids[taken : taken + count].tolist()):
            kv[page] = values[:, i * page_size : (i + 1) * page_size]
        taken += count
    q = torch.randn(sum(q_lens), num_heads, head_dim, generator=rng)
    batch = AttentionBatch(
        np.asarray(q_lens, dtype=np.int32),
        torch.from_numpy(lens).to(device),
        int(lens.max()),
        table.to(device),
        page_size,
        tree,
        host_kv_lens=lens if host_kv_lens else None,
    )
    scale = spec.pop("scale", head_dim**-0.5)
    return Step(
        q.to(device, dtype),
        kv.to(device, kv_dtype or dtype),
        batch,
        AttentionSpec(scale=scale, **spec),  # ty: ignore[invalid-argument-type]
    )
