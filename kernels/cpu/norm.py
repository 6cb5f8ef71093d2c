"""RMS normalisation by the CPU kernels; see kernels/norm.py and kernels/packed.py for what they do."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.abi import NormArgs
from kernels.cpu.matrix import activation_bytes
from kernels.cpu.native import emit, empty


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.norm.rms_norm` of float32 `[num_tokens, dim]` with any row stride."""
    num_tokens, dim = x.shape
    out = empty(num_tokens, dim)
    emit(NormArgs(x.data_ptr(), x.stride(0), None, weight.data_ptr(), out.data_ptr(), None, dim, eps), num_tokens)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.norm.add_rms_norm` in float32; the sum takes the place of `residual`."""
    num_tokens, dim = x.shape
    out = empty(num_tokens, dim)
    sources = (x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr())
    emit(NormArgs(*sources, out.data_ptr(), None, dim, eps), num_tokens)
    return out, residual


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`kernels.packed.norm_rows`."""
    num_tokens, dim = x.shape
    out = empty(num_tokens, activation_bytes(dim), dtype=torch.uint8)
    emit(NormArgs(x.data_ptr(), x.stride(0), None, weight.data_ptr(), None, out.data_ptr(), dim, eps), num_tokens)
    return out


def add_norm_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`kernels.packed.add_norm_rows`; the sum takes the place of `residual`."""
    num_tokens, dim = x.shape
    out = empty(num_tokens, activation_bytes(dim), dtype=torch.uint8)
    sources = (x.data_ptr(), x.stride(0), residual.data_ptr(), weight.data_ptr())
    emit(NormArgs(*sources, None, out.data_ptr(), dim, eps), num_tokens)
    return out, residual
