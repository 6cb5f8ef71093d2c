"""PackedMatrix, a weight matrix in the tiles that the CPU kernels read, and PackedLinear, a layer of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kernels.cpu import native
from kernels.cpu.abi import EmbedArgs, Matrix, Packing
from kernels.packed_rows import PackedRows

TILE_ROWS = 16
BLOCK = 32
GROUP = 16
"""Columns of an activation row that share a scale."""
FINE_BYTES = 32
"""Of a group that is kept finely."""
LARGEST_WEIGHT = 127 * 65504.0
"""That int8 packing takes: its scales are float16."""
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True, eq=False)
class PackedMatrix:
    """`[rows, cols]`, stored as src/packing.h says."""

    packing: Packing
    rows: int
    cols: int
    data: Tensor
    """uint8, at a multiple of 64 bytes."""

    @cached_property
    def struct(self) -> Matrix:
        """For the kernels."""
        return Matrix(int(self.packing), self.rows, self.cols, self.data.data_ptr())

    def dequantise(self) -> Tensor:
        """float32 `[rows, cols]`: what the matrix stands for."""
        out = torch.empty(self.rows, self.cols)
        ids = torch.arange(self.rows)
        native.emit(EmbedArgs(ctypes.addressof(self.struct), ids.data_ptr(), out.data_ptr(), self.cols), self.rows)
        return out


def pack(rows: PackedRows | Tensor, arena: Arena | None = None) -> PackedMatrix:
    """Tiles from a file's packed rows, or int8 in groups of 32 columns from a float matrix `[rows, cols]`.

    arena: where to put them; None = memory of their own. Raises RuntimeError where the kernels were not built,
    ValueError for floats that are not finite or too large.
    """
    lib = native.loaded()
    arena = arena or Arena(0)
    if isinstance(rows, PackedRows):
        packing, source = Packing[rows.kind], rows.data.contiguous()
        num_rows, cols = source.shape[0], rows.cols
        data = arena.take(lib.engine_cpu_packed_bytes(packing, num_rows, cols))
        lib.engine_cpu_pack(packing, num_rows, cols, source.data_ptr(), source.stride(0), data.data_ptr())
    else:
        packing, source = Packing.Q8_0, rows.float().contiguous()
        largest = float(source.abs().max())
        if not largest <= LARGEST_WEIGHT:
            raise ValueError(f"its values go up to {largest:g}; int8 packing takes {LARGEST_WEIGHT:g}")
        num_rows, cols = source.shape
        data = arena.take(lib.engine_cpu_packed_bytes(packing, num_rows, cols))
        lib.engine_cpu_pack_int8(num_rows, cols, source.data_ptr(), cols, data.data_ptr())
    return PackedMatrix(packing, num_rows, cols, data)


class Arena:
    """Memory for matrices in large pages, which a processor translates more at a time of; handed out in order."""

    def __init__(self, size_bytes: int = 32 << 20) -> None:
        """size_bytes: taken at a time, or more where a matrix needs it."""
        self._size_bytes = size_bytes
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size_bytes: int) -> Tensor:
        """uint8 `[size_bytes]` at a multiple of 64 bytes."""
        size = -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._left):
            self._left = _huge(max(size, self._size_bytes))
        taken, self._left = self._left[:size_bytes], self._left[size:]
        return taken


def _huge(size_bytes: int) -> Tensor:
    """Zeroed memory that begins at a large page."""
    block = mmap.mmap(-1, size_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        block.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(block, dtype=torch.uint8)
    return whole[-whole.data_ptr() % _HUGE_PAGE :][:size_bytes]


def activation_bytes(dim: int) -> int:
    """Bytes of an activation row of `dim` columns, with room for all its groups to be fine."""
    size = -(-dim // BLOCK) * (BLOCK + 20 + 2 * FINE_BYTES) + 16
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PackedLinear:
    """A linear layer: packed matrices `[rows, in_dim]` of one input, one below the other, and a bias or none."""

    def __init__(self, matrices: Sequence[PackedMatrix], bias: Tensor | None) -> None:
        """bias: float32 `[rows together]`. Raises ValueError where the matrices' inputs differ."""
        self.matrices = tuple(matrices)
        self.bias = bias
        self.in_dim = self.matrices[0].cols
        if any(matrix.cols != self.in_dim for matrix in self.matrices):
            raise ValueError(f"matrices of one input have {[matrix.cols for matrix in self.matrices]} columns")
        self.out_dim = sum(matrix.rows for matrix in self.matrices)
        self._structs = (Matrix * len(self.matrices))(*(matrix.struct for matrix in self.matrices))
        self.address = ctypes.addressof(self._structs)
        """Of the matrices' structs, for the kernels."""
        self.bias_address = None if bias is None else bias.data_ptr()
