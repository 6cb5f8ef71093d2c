"""Operations on packed weights by the CPU kernels; the torch references in kernels/packed.py say what they do."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels.cpu.abi import EmbedArgs, GatedLinearArgs, LinearArgs, QuantiseArgs
from kernels.cpu.matrix import PackedLinear, PackedMatrix, activation_bytes
from kernels.cpu.native import emit, empty


def quantise_rows(x: Tensor) -> Tensor:
    """`kernels.packed.quantise_rows`; x may have any row stride."""
    num_tokens, dim = x.shape
    out = empty(num_tokens, activation_bytes(dim), dtype=torch.uint8)
    emit(QuantiseArgs(x.data_ptr(), x.stride(0), out.data_ptr(), dim), num_tokens)
    return out


def packed_embed(table: PackedMatrix, ids: Tensor) -> Tensor:
    """`kernels.packed.packed_embed`."""
    num_tokens = ids.shape[0]
    assert num_tokens == 1 or ids.stride() == (1,), "ids must be dense"
    out = empty(num_tokens, table.cols)
    emit(EmbedArgs(ctypes.addressof(table.struct), ids.data_ptr(), out.data_ptr(), table.cols), num_tokens)
    return out


def packed_linear(layer: PackedLinear, x: Tensor) -> Tensor:
    """`kernels.packed.packed_linear`."""
    num_tokens = x.shape[0]
    out = empty(num_tokens, layer.out_dim)
    emit(
        LinearArgs(layer.address, len(layer.matrices), x.data_ptr(), layer.bias_address, out.data_ptr(), layer.out_dim),
        num_tokens,
    )
    return out


def packed_gated_linear(layer: PackedLinear, x: Tensor) -> Tensor:
    """`kernels.packed.packed_gated_linear`."""
    num_tokens = x.shape[0]
    out = empty(num_tokens, activation_bytes(layer.out_dim // 2), dtype=torch.uint8)
    emit(GatedLinearArgs(layer.address, x.data_ptr(), layer.bias_address, out.data_ptr()), num_tokens)
    return out
