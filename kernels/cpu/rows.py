"""Rows side by side or added up by the CPU kernels; see kernels/rows.py for what they do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpu.abi import CopyArgs
from kernels.cpu.native import emit, empty


def concat(parts: Sequence[Tensor]) -> Tensor:
    """`kernels.rows.concat` of float32 rows with any stride."""
    assert all(part.dtype == torch.float32 for part in parts)
    num_tokens, width = parts[0].shape[0], sum(part.shape[1] for part in parts)
    out = empty(num_tokens, width)
    place = out.data_ptr()
    for part in parts:
        dim = part.shape[1]
        emit(CopyArgs(part.data_ptr(), part.stride(0), place, width, dim, 0), num_tokens)
        place += dim * part.element_size()
    return out


def add_rows(x: Tensor, total: Tensor) -> Tensor:
    """`kernels.rows.add_rows` in float32; the sum takes the place of `total`."""
    num_tokens, dim = x.shape
    emit(CopyArgs(x.data_ptr(), x.stride(0), total.data_ptr(), total.stride(0), dim, 1), num_tokens)
    return total
