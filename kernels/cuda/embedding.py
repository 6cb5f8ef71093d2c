"""Looking up rows in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import is_wanted


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """`kernels.linear.embed`; the ids are taken to be in range, and rows may be any distance apart."""
    (num_tokens,), dim = ids.shape, table.shape[1]
    out = torch.empty((num_tokens, dim), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    assert table.stride(1) == 1 and (num_tokens == 1 or ids.stride(0) == 1), "rows and ids must be dense"
    block = min(triton.next_power_of_2(dim), 1024)
    kernel: Any = copy_rows[(num_tokens * triton.cdiv(dim, block),)]
    pdl = is_wanted(table)
    kernel(
        table,
        ids,
        out,
        table.stride(0),
        DIM=dim,
        BLOCK=block,
        PDL=pdl,
        num_warps=max(block // 256, 1),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def copy_rows(table, ids, out, stride, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """BLOCK columns of a row of the result; blocks of a row are neighbours."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (DIM + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < DIM
    values = tl.load(table + tl.load(ids + row) * stride + columns, mask=mask)
    tl.store(out + row * DIM + columns, values, mask=mask)
