"""The dense product on CUDA, with the same bits for a token whatever else is in the step.

A kernel's tile decides which instruction multiplies, and in what order a sum is made. So the tile follows from the
weights alone: one token and 8192 tokens are multiplied in the same way, and no sum is split among programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.small_gemm import apply_gate

TOKENS = 64
"""Tokens of a tile: the fewest that Hopper's matrix units multiply at once."""
GROUP = 16
"""Tiles of tokens that go through the weights together, which then stay in the cache for all of them."""
MANY_ROWS = 1 << 14
"""Rows of weights from which tiles of twice as many still fill a device; they need fewer bytes for each product."""


@dataclass(frozen=True)
class FixedTile:
    """Of what a program multiplies at a time."""

    rows: int
    """Of weights."""
    depth: int
    """Columns of weights and of x."""
    stages: int
    """How many are in shared memory: that of a multiprocessor of compute capability 8.6 suffices."""
    warps: int


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`kernels.linear.linear`; rows of x and of weight may be any distance apart. Sums in float32 are rounded once,
    after the bias."""
    return _launch(x, weight, bias, gated=False)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`kernels.linear.gated_linear`, as linear: gate and up are rounded, then silu, then the product, as in torch."""
    return _launch(x, weight, bias, gated=True)


def fixed_tile(num_rows: int, dtype: torch.dtype) -> FixedTile:
    """The tile for weights of so many rows."""
    if dtype == torch.float32:
        return FixedTile(64, 16, 3, 4)
    return FixedTile(128, 64, 4, 4) if num_rows >= MANY_ROWS else FixedTile(64, 64, 5, 4)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, *, gated: bool) -> Tensor:
    num_tokens, in_dim = x.shape
    num_rows = weight.shape[0]
    results = num_rows // 2 if gated else num_rows
    out = torch.empty((num_tokens, results), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    assert in_dim <= 1 or x.stride(1) == weight.stride(1) == 1, "rows must be dense"
    assert weight.dtype == x.dtype and weight.shape[1] == in_dim, (weight.dtype, weight.shape, x.dtype, x.shape)
    assert bias is None or (bias.is_contiguous() and bias.dtype == x.dtype), "the bias must be dense"
    tile = fixed_tile(num_rows, x.dtype)
    columns = tile.rows // 2 if gated else tile.rows
    kernel: Any = fixed_kernel[(triton.cdiv(results, columns) * triton.cdiv(num_tokens, TOKENS),)]
    kernel(
        x,
        weight,
        bias,
        out,
        num_tokens,
        results,
        in_dim,
        x.stride(0),
        weight.stride(0),
        TOKENS=TOKENS,
        ROWS=tile.rows,
        DEPTH=tile.depth,
        GROUP=GROUP,
        EVEN=in_dim % tile.depth == 0,
        GATED=gated,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit(do_not_specialize=["num_tokens"])
def fixed_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    OUT_DIM,
    in_dim,
    x_stride,
    weight_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """TOKENS tokens by ROWS rows of the weights, half of them gate's and half up's where GATED.

    Grid: tiles; GROUP tiles of tokens go through all of the weights before the next ones do. EVEN: in_dim is a multiple
    of DEPTH. OUT_DIM: columns of out, whose rows are dense.
    """
    WIDTH: tl.constexpr = ROWS // 2 if GATED else ROWS
    tile = tl.program_id(0)
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    group_size = GROUP * tl.cdiv(OUT_DIM, WIDTH)
    first_tile = tile // group_size * GROUP
    in_group = tl.minimum(token_tiles - first_tile, GROUP)
    token = (first_tile + tile % group_size % in_group) * TOKENS + tl.arange(0, TOKENS)
    first_column = tile % group_size // in_group * WIDTH
    # Past the last row the last one is read again, which spares a mask; nothing is stored from there.
    row = tl.arange(0, ROWS)
    if GATED:
        row = tl.minimum(first_column + row % WIDTH, OUT_DIM - 1) + row // WIDTH * OUT_DIM
    else:
        row = tl.minimum(first_column + row, OUT_DIM - 1)

    k = tl.arange(0, DEPTH)
    tokens = x_ptr + token.to(tl.int64)[:, None] * x_stride + k[None, :]
    weights = weight_ptr + row.to(tl.int64)[:, None] * weight_stride + k[None, :]
    here = (token < num_tokens)[:, None]
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in range(0, in_dim, DEPTH):
        if EVEN:
            x = tl.load(tokens + start, mask=here, other=0.0)
            w = tl.load(weights + start)
        else:
            inside = (k + start < in_dim)[None, :]
            x = tl.load(tokens + start, mask=here & inside, other=0.0)
            w = tl.load(weights + start, mask=inside, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc, input_precision=PRECISION)

    dtype = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    if GATED:
        acc = apply_gate(acc, dtype)
    column = first_column + tl.arange(0, WIDTH)[None, :]
    places = out_ptr + token.to(tl.int64)[:, None] * OUT_DIM + column
    tl.store(places, acc.to(dtype), mask=here & (column < OUT_DIM))
