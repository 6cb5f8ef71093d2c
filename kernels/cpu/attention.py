"""Paged attention by the CPU kernels; see kernels/attention.py for what it does."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cpu.abi import AttentionArgs, KvPages, KvType
from kernels.cpu.native import emit, empty, recorder
from kernels.cpu.tree import StepTrees

_TYPES = {
    torch.float32: KvType.F32,
    torch.float16: KvType.F16,
    torch.bfloat16: KvType.BF16,
    torch.int8: KvType.I8,
}


def kv_pages(kv: Tensor) -> KvPages:
    """What the kernels need to know of one layer's pages.

    kv: `[num_pages, 2, page_size, num_kv_heads, head_dim]` of float32, float16 or bfloat16, or int8 with a last
    dimension of head_dim + 4: codes and the bytes of their float32 scale. Any strides, but heads are dense.
    """
    page, half, token, head, element = (stride * kv.element_size() for stride in kv.stride())
    assert element == kv.element_size(), "the elements of a head must be dense"
    return KvPages(kv.data_ptr(), _TYPES[kv.dtype], kv.shape[2], page, half, token, head)


def paged_attention(
    q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
) -> Tensor:
    """`kernels.attention.paged_attention` of float32 queries, whose tokens may be any distance apart.

    head_dim: a multiple of 8, 256 at most. The result of a token does not depend on the rest of the batch, nor on how
    its context was cut into steps. With int8 pages, queries are rounded to int8 for
    the scores, and the weights of values to 15 or 16 bits. Knows scale, window and trees: no other masks, no lse; every
    row has tokens.

    With a tree, what a token sees of its row's tokens must be one of each depth up to its own: its ancestors, in any
    order, and itself; a row adds 256 tokens at most (kernels.cpu.tree). Its result has the bits of plain decoding:
    those of a step of one token after a context of its row's and then its ancestors, where the window holds these.
    While a program is recorded, trees are none of the batch's: its runs go by `Program.trees`.
    """
    assert spec.softcap is None and spec.sinks is None and spec.k_scale == spec.v_scale == 1.0
    assert lse is None
    num_tokens, num_heads, head_dim = q.shape
    assert q.dtype == torch.float32 and q.stride()[1:] == (head_dim, 1), "heads of a token must be dense float32"
    assert head_dim % 8 == 0 and head_dim <= 256, head_dim
    q_lens = np.ascontiguousarray(batch.q_lens, dtype=np.int32)
    page_table = _int32_table(batch)
    trees = _trees(batch)
    out = empty(num_tokens, num_heads, head_dim)
    args = AttentionArgs(
        q=q.data_ptr(),
        q_stride=q.stride(0),
        out=out.data_ptr(),
        out_stride=out.stride(0),
        num_heads=num_heads,
        num_kv_heads=kv.shape[3],
        head_dim=head_dim,
        scale=spec.scale,
        window=spec.window or 0,
        q_lens=q_lens.ctypes.data,
        kv_lens=batch.kv_lens.data_ptr(),
        page_table=page_table.data_ptr(),
        page_table_stride=page_table.stride(0),
        kv=kv_pages(kv),
        tree=None if trees is None else trees.address,
    )
    emit(args, num_tokens, len(q_lens))
    return out


def _trees(batch: AttentionBatch) -> StepTrees | None:
    taker = recorder.get()
    if taker is not None:
        assert batch.tree is None, "a program is recorded without trees; Program.trees are those of its runs"
        return taker.trees
    if batch.tree is None:
        return None
    key = "cpu trees"
    known = batch.memo.get(key)
    if not isinstance(known, StepTrees):
        known = StepTrees()
        known.set(batch.tree, batch.q_lens)
        batch.memo[key] = known
    return known


def _int32_table(batch: AttentionBatch) -> Tensor:
    table = batch.page_table
    if table.dtype == torch.int32 and table.stride(1) == 1:
        return table
    key = "cpu page table"
    known = batch.memo.get(key)
    if not isinstance(known, Tensor):
        known = table.to(torch.int32).contiguous()
        batch.memo[key] = known
    return known
