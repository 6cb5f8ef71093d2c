"""The product of some tokens' activations with a matrix of weights, by tiles that pass through shared memory.

For more tokens than the kernels of small_gemm.py like: there every 8 to 32 rows of the weights read all activations
again, here every 64 or 128 rows do. Loads are asynchronous and several tiles ahead of the products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import prefetch
from kernels.cuda.small_gemm import fetch_ahead, finish, weight_rows


@triton.jit(do_not_specialize=["num_tokens"])
def tile_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    scratch_ptr,
    tickets_ptr,
    num_tokens,
    OUT_DIM,
    in_dim,
    x_stride,
    weight_stride,
    out_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program sums a part of in_dim for ROWS rows of the weights and all tokens; the last one of a tile adds parts.

    Grid: (tiles, PARTS), with no more parts than steps of DEPTH columns. TOKENS: a power of two, at least 16 and
    num_tokens; EVEN: in_dim is a multiple of DEPTH. scratch: fp32 `[tiles, PARTS, ROWS, TOKENS]`, and a ticket for each
    tile, where PARTS > 1. AHEAD: see fetch_ahead; 0 without PDL. num_tokens has no part in the order of the sum.
    """
    tile = tl.program_id(0)
    part = tl.program_id(1)
    steps = tl.cdiv(in_dim, DEPTH)
    first = steps * part // PARTS * DEPTH
    end = steps * (part + 1) // PARTS * DEPTH
    row = weight_rows(tl.arange(0, ROWS), OUT_DIM, GATED, ROWS)
    token = tl.arange(0, TOKENS)
    k = tl.arange(0, DEPTH)
    rows = weight_ptr + row.to(tl.int64) * weight_stride
    if AHEAD > 0:
        fetch_ahead(rows, first, in_dim, AHEAD)
    if PDL:
        if bias_ptr is not None:
            prefetch(bias_ptr + row)
        # Beyond the weights nothing is ours before this: x, the tickets, and the memory of `out` and of the scratch.
        gdc_wait()
        gdc_launch_dependents()
    weights = rows[:, None] + k[None, :]
    tokens = x_ptr + token[:, None] * x_stride + k[None, :]
    here = (token < num_tokens)[:, None]
    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(first, end, DEPTH):
        if EVEN:
            w = tl.load(weights + start, eviction_policy="evict_first")
            x = tl.load(tokens + start, mask=here, other=0.0)
        else:
            inside = (k + start < in_dim)[None, :]
            w = tl.load(weights + start, mask=inside, other=0.0, eviction_policy="evict_first")
            x = tl.load(tokens + start, mask=here & inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    if PARTS > 1:
        place = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
        parts = scratch_ptr + tile * (PARTS * ROWS * TOKENS) + place
        tl.store(parts + part * (ROWS * TOKENS), acc)
        # All threads' stores come before the one ticket, which releases them to whoever draws the last.
        tl.debug_barrier()
        if tl.atomic_add(tickets_ptr + tile, 1, sem="acq_rel", scope="gpu") != PARTS - 1:
            return
        acc = tl.load(parts, cache_modifier=".cg")
        for other in tl.static_range(1, PARTS):
            acc += tl.load(parts + other * (ROWS * TOKENS), cache_modifier=".cg")
        tl.store(tickets_ptr + tile, 0)
    finish(tl.trans(acc), bias_ptr, out_ptr, num_tokens, OUT_DIM, out_stride, GATED)
