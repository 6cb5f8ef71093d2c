"""RMS normalisation in Triton; see kernels/norm.py for what the functions do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.fp8 import encode, format_of, has_instruction, largest_of
from kernels.cuda.pdl import is_wanted, prefetch_vector

MAX_BLOCK = 16384
"""The longest row that a program keeps in registers."""
CHUNK = 8192
"""How much of a longer row it has at a time."""
SHORT_DIM = 2048
"""Up to this dimension the product behind a norm may begin while the one before it still runs. Above, products fill the
device for longer, and programs that wait take the places of those that work (docs/performance.md)."""

_SHORT_DIM = tl.constexpr(SHORT_DIM)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm`; the result is dense."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, eps, out, None, "")
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.norm.add_rms_norm`; the sum takes the place of `residual`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, out, None, "")
    return out, residual


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`kernels.norm.rms_norm_quantised`."""
    codes, scales = _code_buffers(x)
    _launch(x, None, weight, eps, codes, scales, format_of(dtype))
    return codes.view(dtype), scales


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.norm.add_rms_norm_quantised`; the sum takes the place of `residual`."""
    codes, scales = _code_buffers(x)
    _launch(x, residual, weight, eps, codes, scales, format_of(dtype))
    return codes.view(dtype), scales, residual


def norm_config(dim: int) -> tuple[int, int, int]:
    """Elements of a row at a time, rows of a program, warps; all the same for any number of rows, so that a row's
    result does not depend on the batch.

    A thread has 8 elements of 2 bytes, one access, as far as that goes: the fewer warps wait for a row the better.
    """
    block = triton.next_power_of_2(dim)
    if block > MAX_BLOCK:
        return CHUNK, 1, 16
    return block, max(1, 1024 // block), min(max(block // 256, 4), 16)


def _code_buffers(x: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens, dim = x.shape
    codes = torch.empty((num_tokens, dim), dtype=torch.uint8, device=x.device)
    return codes, torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor, scales: Tensor | None, format: str
) -> None:
    dim = x.shape[-1]
    num_rows = x.numel() // dim if dim else 0
    if num_rows == 0:
        return
    if x.stride(-1) != 1:
        x = x.contiguous()
    inner, outer_stride, inner_stride = 1, 0, 0
    if x.dim() == 2:
        outer_stride = x.stride(0)
    elif x.dim() == 3:
        inner, outer_stride, inner_stride = x.shape[1], x.stride(0), x.stride(1)
    elif x.dim() > 3:
        x = x.reshape(-1, dim)
        outer_stride = x.stride(0)
    residual_stride = 0
    if residual is not None:
        assert residual.shape == x.shape and residual.dtype == x.dtype and x.dim() == 2
        assert residual.stride(1) == 1, "the rows of the residual must be dense"
        residual_stride = residual.stride(0)
    assert weight.shape == (dim,) and weight.stride(0) == 1
    block, rows, warps = norm_config(dim)
    grid = (triton.cdiv(num_rows, rows),)
    pdl = is_wanted(x)
    kernel: Any = rms_rows[grid] if dim <= block else rms_long_rows[grid]
    kernel(
        x,
        residual,
        weight,
        out,
        scales,
        num_rows,
        inner,
        outer_stride,
        inner_stride,
        residual_stride,
        eps,
        DIM=dim,
        BLOCK=block,
        ROWS=rows,
        FORMAT=format,
        INSTRUCTION=format != "" and has_instruction(x.device),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


@triton.jit
def _load_sum(x, residual, x_at, residual_at, mask):
    """Elements of x, or of the sum with the residual, as that is rounded."""
    values = tl.load(x + x_at, mask=mask, other=0.0)
    if residual is not None:
        added = tl.load(residual + residual_at, mask=mask, other=0.0)
        values = (added.to(tl.float32) + values.to(tl.float32)).to(values.dtype)
    return values


@triton.jit
def weighted(values, scale, weight):
    """`values * scale * weight`, rounded to the type of values after each product."""
    normed = (values.to(tl.float32) * scale).to(values.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(values.dtype)


@triton.jit
def _code_scale(largest, FORMAT: tl.constexpr):
    scale = tl.div_rn(largest, tl.full(largest.shape, largest_of(FORMAT), tl.float32))
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _codes(normed, scale, FORMAT: tl.constexpr, INSTRUCTION: tl.constexpr):
    wide = normed.to(tl.float32)
    return encode(tl.div_rn(wide, tl.broadcast_to(scale, wide.shape)), FORMAT, INSTRUCTION)


@triton.jit(do_not_specialize=["num_rows"])
def rms_rows(
    x,
    residual,
    weight,
    out,
    scales,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows, each of at most BLOCK elements, wholly in registers.

    Row r of x lies at `r // inner * outer_stride + r % inner * inner_stride`; out and scales are dense. The sum with
    the residual, if there is one, replaces it. FORMAT: of the codes, empty if there are none.
    """
    if PDL:
        if DIM <= _SHORT_DIM:
            gdc_launch_dependents()
        prefetch_vector(weight, DIM)
        gdc_wait()
        if DIM > _SHORT_DIM:
            gdc_launch_dependents()
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    if ROWS == 1:
        mask = columns < DIM
    else:
        mask = (rows < num_rows) & (columns < DIM)
    x_at = (rows // inner).to(tl.int64) * outer_stride + rows % inner * inner_stride + columns
    residual_at = rows.to(tl.int64) * residual_stride + columns
    out_at = rows.to(tl.int64) * DIM + columns
    values = _load_sum(x, residual, x_at, residual_at, mask)
    # Before the sum over the row, to arrive while it is waited for; for each row, so that it comes in its layout.
    weight_at = tl.broadcast_to(columns, [ROWS, BLOCK])
    weights = tl.load(weight + weight_at, mask=weight_at < DIM, other=0.0)
    if residual is not None:
        tl.store(residual + residual_at, values, mask=mask)
    wide = values.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1, keep_dims=True) * (1.0 / DIM)
    normed = weighted(values, tl.rsqrt(mean + eps), weights)
    if FORMAT == "":
        tl.store(out + out_at, normed, mask=mask)
    else:
        scale = _code_scale(_largest(tl.abs(normed.to(tl.float32)), 1), FORMAT)
        tl.store(out + out_at, _codes(normed, scale, FORMAT, INSTRUCTION), mask=mask)
        tl.store(scales + rows, scale, mask=rows < num_rows)


@triton.jit
def _largest(magnitudes, AXIS: tl.constexpr):
    """The largest along an axis, which stays; NaN where there is one or an infinity, as then no code says anything."""
    broken = (magnitudes != magnitudes) | (magnitudes == float("inf"))
    largest = tl.max(tl.where(broken, 0.0, magnitudes), axis=AXIS, keep_dims=True)
    return tl.where(tl.max(broken.to(tl.int32), axis=AXIS, keep_dims=True) > 0, float("nan"), largest)


@triton.jit(do_not_specialize=["num_rows"])
def rms_long_rows(
    x,
    residual,
    weight,
    out,
    scales,
    num_rows,
    inner,
    outer_stride,
    inner_stride,
    residual_stride,
    eps,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """`rms_rows` for one row of any length, which is read again for each thing that is to be known of all of it."""
    if PDL:
        if DIM <= _SHORT_DIM:
            gdc_launch_dependents()
        prefetch_vector(weight, DIM)
        gdc_wait()
        if DIM > _SHORT_DIM:
            gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    x += row // inner * outer_stride + row % inner * inner_stride
    out += row * DIM
    residual_at = row * residual_stride
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, DIM, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        wide = _load_sum(x, residual, columns, residual_at + columns, columns < DIM).to(tl.float32)
        squares += wide * wide
    scale = tl.rsqrt(tl.sum(squares, axis=0) * (1.0 / DIM) + eps)
    if FORMAT != "":
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, DIM, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < DIM
            values = _load_sum(x, residual, columns, residual_at + columns, mask)
            normed = weighted(values, scale, tl.load(weight + columns, mask=mask, other=0.0))
            largest = tl.maximum(largest, tl.abs(normed.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
        code_scale = _code_scale(_largest(largest, 0), FORMAT)
        tl.store(scales + row + tl.arange(0, 1), code_scale)
    for start in range(0, DIM, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < DIM
        values = _load_sum(x, residual, columns, residual_at + columns, mask)
        normed = weighted(values, scale, tl.load(weight + columns, mask=mask, other=0.0))
        if residual is not None:
            tl.store(residual + residual_at + columns, values, mask=mask)
        if FORMAT == "":
            tl.store(out + columns, normed, mask=mask)
        else:
            tl.store(out + columns, _codes(normed, code_scale, FORMAT, INSTRUCTION), mask=mask)
