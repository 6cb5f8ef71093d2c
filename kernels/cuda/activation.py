"""The gate of a gated MLP in Triton; see kernels/activation.py for what the functions do."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.pdl import is_wanted


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`kernels.activation.silu_and_mul`; rows of gate_up may be any distance apart."""
    return _launch(gate_up, "silu")


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`kernels.activation.gelu_and_mul`; rows of gate_up may be any distance apart."""
    return _launch(gate_up, "gelu")


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`kernels.activation.gelu_tanh_and_mul`; rows of gate_up may be any distance apart."""
    return _launch(gate_up, "gelu_tanh")


def _launch(gate_up: Tensor, function: str) -> Tensor:
    num_tokens, width = gate_up.shape
    inner = width // 2
    out = torch.empty((num_tokens, inner), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    assert gate_up.stride(1) == 1, "rows must be dense"
    block = min(triton.next_power_of_2(inner), 1024)
    kernel: Any = gate_rows[(num_tokens * triton.cdiv(inner, block),)]
    pdl = is_wanted(gate_up)
    kernel(
        gate_up,
        out,
        gate_up.stride(0),
        INNER=inner,
        BLOCK=block,
        FUNCTION=function,
        PDL=pdl,
        num_warps=max(block // 256, 1),
        launch_pdl=pdl,
    )
    return out


@triton.jit
def _activated(x, FUNCTION: tl.constexpr):
    if FUNCTION == "silu":
        return x / (1.0 + tl.exp(-x))
    elif FUNCTION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)), which loses nothing where tanh is near -1; 1.59... = 2 sqrt(2 / pi).
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


@triton.jit
def gate_rows(
    gate_up, out, stride, INNER: tl.constexpr, BLOCK: tl.constexpr, FUNCTION: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK columns of a row of the result; blocks of a row are neighbours. The activation is rounded before the
    product, as where it is an operation of its own."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    columns = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mask = columns < INNER
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + row * stride + INNER + columns, mask=mask, other=0.0)
    activated = _activated(gate.to(tl.float32), FUNCTION).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(out + row * INNER + columns, product.to(gate.dtype), mask=mask)
