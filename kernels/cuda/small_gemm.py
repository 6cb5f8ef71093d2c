"""Kernels for the product of a few rows of activations with a matrix of weights: they read each weight once.

At few tokens the weights' bytes are all that counts. So these kernels keep many loads of 16 bytes on their way and do
nothing else that takes time: weights go from memory into registers, past shared memory and without barriers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import prefetch


@triton.jit
def weight_rows(columns, OUT_DIM, GATED: tl.constexpr, ROWS: tl.constexpr):
    """Rows of the weights behind a program's columns of results: half of gate and half of up where gated.

    Past the last row the last row is read again, which spares a mask; nothing is stored from there.
    """
    if GATED:
        half: tl.constexpr = ROWS // 2
        rows = tl.minimum(tl.program_id(0) * half + columns % half, OUT_DIM - 1) + columns // half * OUT_DIM
    else:
        rows = tl.minimum(tl.program_id(0) * ROWS + columns, OUT_DIM - 1)
    return rows


@triton.jit
def fetch_ahead(rows, first, in_dim, AHEAD: tl.constexpr):
    """Ask for AHEAD columns from `first` on, behind each pointer to a row, to be in the cache soon. Hopper and later.

    So what is on its way before the kernel before has ended is not bound by registers or shared memory. Rows begin at
    multiples of 16 bytes and have at least 128 columns; past the last column the last ones are asked for again.
    """
    column = tl.minimum(first + tl.arange(0, AHEAD // 128) * 128, in_dim - 128)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 256; // nothing for $0",
        "=r,l",
        [(rows[:, None] + column[None, :]).to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def apply_gate(acc, dtype: tl.constexpr):
    """`silu(gate) * up` of fp32 `[tokens, gates and ups]`, rounded where separate operations in dtype would round, but
    for the result."""
    TOKENS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    pair = acc.to(dtype).to(tl.float32).reshape(TOKENS, 2, ROWS // 2).permute(0, 2, 1)
    gate, up = tl.split(pair)
    return (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up


@triton.jit
def finish(acc, bias_ptr, out_ptr, num_tokens, OUT_DIM, out_stride, GATED: tl.constexpr):
    """Add the bias, apply the gate, round and store. acc: fp32 `[tokens, rows]`."""
    TOKENS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    dtype = out_ptr.dtype.element_ty
    if bias_ptr is not None:
        rows = weight_rows(tl.arange(0, ROWS), OUT_DIM, GATED, ROWS)
        acc += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
    if GATED:
        result = apply_gate(acc, dtype)
    else:
        result = acc
    WIDTH: tl.constexpr = result.shape[1]
    token = tl.arange(0, TOKENS)[:, None]
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :]
    keep = (token < num_tokens) & (column < OUT_DIM)
    tl.store(out_ptr + token * out_stride + column, result.to(dtype), mask=keep)


@triton.jit
def _strip_weights(pointers, k, start, in_dim, ROWS: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, EVEN):
    """A tile of weights `[WARPS, UNROLL * 32, ROWS]`, each warp's share of the reduction apart.

    It is loaded as `[.., 32]`, where a thread has 8 neighbours (16 bytes). What a thread holds of 32 is then *called*
    the places that it has in the tensor core's operand: any order along the reduction is right if the activations have
    the same. So no value changes its register, let alone its thread.
    """
    if EVEN:
        tile = tl.load(pointers + start, mask=start < in_dim, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers + start, mask=k + start < in_dim, other=0.0, eviction_policy="evict_first")
    tile = tile.reshape(UNROLL, ROWS // 8, WARPS, 8, 4, 4, 2).permute(2, 0, 5, 4, 6, 1, 3)
    return tile.reshape(WARPS, UNROLL * 32, ROWS)


@triton.jit
def _strip_tokens(
    pointers, token, k, start, num_tokens, in_dim, TOKENS: tl.constexpr, WARPS: tl.constexpr, UNROLL: tl.constexpr, EVEN
):
    """The activations `[WARPS, TOKENS, UNROLL * 32]` for `_strip_weights`."""
    keep = (token < num_tokens) & (start < in_dim)
    if not EVEN:
        keep = keep & (k + start < in_dim)
    tile = tl.load(pointers + start, mask=keep, other=0.0)
    tile = tile.reshape(UNROLL, TOKENS // 8, WARPS, 8, 4, 4, 2).permute(2, 1, 3, 0, 5, 4, 6)
    return tile.reshape(WARPS, TOKENS, UNROLL * 32)


@triton.jit(do_not_specialize=["num_tokens"])
def strip_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    OUT_DIM,
    in_dim,
    x_stride,
    weight_stride,
    out_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program makes ROWS columns of the result (half as many where gated) for all tokens; its warps share in_dim.

    TOKENS: 8 or a multiple of 16, at least num_tokens; ROWS: a multiple of 8, of 16 where gated; WARPS: as launched;
    EVEN: in_dim is a multiple of `WARPS * UNROLL * 32`; AHEAD: see fetch_ahead; 0 without PDL. num_tokens has no part
    in the order of the sum.

    Two tiles of weights are on their way at any time, one iteration ahead of the products with them. Activations are
    loaded when they are needed: they are near, and what that takes passes while the weights come.
    """
    step: tl.constexpr = WARPS * UNROLL * 32
    # Row a of a tile is (part, warp, one of 8 rows): those 8 are a tensor core's, and 4 threads hold 64 bytes of each.
    a = tl.arange(0, WARPS * UNROLL * ROWS)[:, None]
    b = tl.arange(0, WARPS * UNROLL * TOKENS)[:, None]
    c = tl.arange(0, 32)[None, :]
    row = weight_rows((a // (8 * WARPS)) % (ROWS // 8) * 8 + a % 8, OUT_DIM, GATED, ROWS)
    row_k = (a // 8 % WARPS * UNROLL + a // (WARPS * ROWS)) * 32 + c
    token = (b // (8 * WARPS)) % (TOKENS // 8) * 8 + b % 8
    token_k = (b // 8 % WARPS * UNROLL + b // (WARPS * TOKENS)) * 32 + c
    weights = weight_ptr + row.to(tl.int64) * weight_stride + row_k
    tokens = x_ptr + token * x_stride + token_k

    w0 = _strip_weights(weights, row_k, 0, in_dim, ROWS, WARPS, UNROLL, EVEN)
    w1 = _strip_weights(weights, row_k, step, in_dim, ROWS, WARPS, UNROLL, EVEN)
    if AHEAD > 0:
        rows = weight_rows(tl.arange(0, ROWS), OUT_DIM, GATED, ROWS)
        fetch_ahead(weight_ptr + rows.to(tl.int64) * weight_stride, 2 * step, in_dim, AHEAD)
    if PDL:
        if bias_ptr is not None:
            prefetch(bias_ptr + weight_rows(tl.arange(0, ROWS), OUT_DIM, GATED, ROWS))
        # Weights are nobody's result. But x is one, and the memory of `out` may still be read.
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([WARPS, TOKENS, ROWS], tl.float32)
    for start in range(0, in_dim, 2 * step):
        x0 = _strip_tokens(tokens, token, token_k, start, num_tokens, in_dim, TOKENS, WARPS, UNROLL, EVEN)
        x1 = _strip_tokens(tokens, token, token_k, start + step, num_tokens, in_dim, TOKENS, WARPS, UNROLL, EVEN)
        acc = tl.dot(x0, w0, acc)
        w0 = _strip_weights(weights, row_k, start + 2 * step, in_dim, ROWS, WARPS, UNROLL, EVEN)
        acc = tl.dot(x1, w1, acc)
        w1 = _strip_weights(weights, row_k, start + 3 * step, in_dim, ROWS, WARPS, UNROLL, EVEN)
    finish(tl.sum(acc, 0), bias_ptr, out_ptr, num_tokens, OUT_DIM, out_stride, GATED)


@triton.jit
def _vector_weights(pointers, k, start, in_dim, EVEN: tl.constexpr):
    """A tile of weights `[ROWS, WIDTH]`."""
    if EVEN:
        tile = tl.load(pointers + start, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers + start, mask=(k + start < in_dim)[None, :], other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _vector_add(acc, w, x_ptr, k, start, in_dim, EVEN: tl.constexpr):
    """acc `[ROWS, WIDTH / 8]` and the products of a tile: the 8 neighbours that a thread holds are one sum."""
    if EVEN:
        x = tl.load(x_ptr + start + k)
    else:
        x = tl.load(x_ptr + start + k, mask=k + start < in_dim, other=0.0)
    products = w.to(tl.float32) * x.to(tl.float32)[None, :]
    return acc + tl.sum(products.reshape(products.shape[0], products.shape[1] // 8, 8), 2)


@triton.jit
def vector_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    OUT_DIM,
    in_dim,
    weight_stride,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    EVEN: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One token's result without tensor cores: a program makes ROWS columns (half as many where gated).

    TILES: 1 or 2, of WIDTH columns of the weights, are on their way at any time; a tile's place is loaded anew as soon
    as its products are taken. EVEN: in_dim is a multiple of `TILES * WIDTH`. AHEAD: see fetch_ahead; 0 without PDL.
    """
    row = weight_rows(tl.arange(0, ROWS), OUT_DIM, GATED, ROWS)
    k = tl.arange(0, WIDTH)
    rows = weight_ptr + row.to(tl.int64) * weight_stride
    weights = rows[:, None] + k[None, :]
    w0 = _vector_weights(weights, k, 0, in_dim, EVEN)
    w1 = w0
    if TILES == 2:
        w1 = _vector_weights(weights, k, WIDTH, in_dim, EVEN)
    if AHEAD > 0:
        fetch_ahead(rows, TILES * WIDTH, in_dim, AHEAD)
    if PDL:
        if bias_ptr is not None:
            prefetch(bias_ptr + row)
        # Weights are nobody's result. But x is one, and the memory of `out` may still be read.
        gdc_wait()
        gdc_launch_dependents()
    acc = tl.zeros([ROWS, WIDTH // 8], tl.float32)
    step: tl.constexpr = TILES * WIDTH
    last = (in_dim - 1) // step * step
    for start in range(0, last, step):
        acc = _vector_add(acc, w0, x_ptr, k, start, in_dim, EVEN)
        w0 = _vector_weights(weights, k, start + step, in_dim, EVEN)
        if TILES == 2:
            acc = _vector_add(acc, w1, x_ptr, k, start + WIDTH, in_dim, EVEN)
            w1 = _vector_weights(weights, k, start + step + WIDTH, in_dim, EVEN)
    acc = _vector_add(acc, w0, x_ptr, k, last, in_dim, EVEN)
    if TILES == 2:
        acc = _vector_add(acc, w1, x_ptr, k, last + WIDTH, in_dim, EVEN)
    finish(tl.sum(acc, 1)[None, :], bias_ptr, out_ptr, 1, OUT_DIM, 0, GATED)
