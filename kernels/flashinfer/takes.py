"""What an attention kernel can do, as data: for the choice among kernels, and for refusing what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec

CAUSAL = "causal"
TREE = "tree"
HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Takes:
    """The calls that a kernel takes."""

    page_sizes: frozenset[int] | None
    """In tokens; None: any."""
    ragged: bool
    """Rows may add different numbers of tokens; else all rows of a step add the same."""
    masks: frozenset[str]
    """Of CAUSAL, TREE."""
    lse: bool
    kv_dtypes: frozenset[torch.dtype]
    """Of pages. Pages of 16-bit floats have the queries' type besides."""
    head_dims: frozenset[int]
    needs_host_lengths: bool
    """Plans with the lengths of contexts on the host: without `host_kv_lens` a step waits for the step before."""
    cuda_graph: bool
    """May be called while a graph is being captured."""
    softcap: bool
    max_q_len: int | None = None
    """Of a row, in tokens; None: any."""
    windowed_q_len: int | None = None
    """The same where the layer has a window."""
    max_group: int | None = None
    """Query heads per head of keys and values; None: any."""
    aligned_heads: bool = False
    """Heads in pages begin at multiples of head_dim."""

    def refusal(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None
    ) -> str | None:
        """Why these arguments of `paged_attention` are not taken; None if they are."""
        mask = CAUSAL if batch.tree is None else TREE
        uniform = uniform_q_len(batch)
        longest = int(batch.q_lens.max(initial=0))
        group = q.shape[1] // kv.shape[3]
        if q.dtype not in HALVES:
            return f"queries of {q.dtype}"
        if kv.dtype not in self.kv_dtypes or (kv.dtype in HALVES and kv.dtype != q.dtype):
            return f"pages of {kv.dtype} with queries of {q.dtype}"
        if spec.v_scale != 1.0 and kv.dtype in HALVES:
            return "a v_scale for pages that are not quantised"
        if self.page_sizes is not None and batch.page_size not in self.page_sizes:
            return f"pages of {batch.page_size} tokens"
        if q.shape[2] not in self.head_dims:
            return f"a head_dim of {q.shape[2]}"
        if kv.stride(4) != 1 or (self.aligned_heads and any(stride % q.shape[2] for stride in kv.stride()[:4])):
            return f"pages whose heads are not dense or not at multiples of head_dim: strides {kv.stride()}"
        if self.max_group is not None and group > self.max_group:
            return f"{group} query heads per head of keys"
        if not self.ragged and uniform is None:
            return "rows that add different numbers of tokens"
        if self.max_q_len is not None and longest > self.max_q_len:
            return f"rows that add {longest} tokens"
        if spec.window is not None and self.windowed_q_len is not None and longest > self.windowed_q_len:
            return f"rows that add {longest} tokens to a window"
        if mask not in self.masks:
            return f"a {mask} mask"
        if spec.softcap is not None and not self.softcap:
            return "a softcap"
        if lse is not None and not self.lse:
            return "a wanted lse"
        return None

    def check(
        self, name: str, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None
    ) -> None:
        """Raises ValueError, with the reason, for what is not taken."""
        reason = self.refusal(q, kv, batch, spec, lse)
        if reason is not None:
            raise ValueError(f"{name} does not take {reason}")


def uniform_q_len(batch: AttentionBatch) -> int | None:
    """How many tokens every row adds, at least 1; None if that differs among rows."""
    key = (__name__, "uniform_q_len")
    if key not in batch.memo:
        first = int(batch.q_lens[0]) if len(batch.q_lens) else 0
        batch.memo[key] = first if first > 0 and bool((batch.q_lens == first).all()) else None
    known = batch.memo[key]
    assert known is None or isinstance(known, int)
    return known
