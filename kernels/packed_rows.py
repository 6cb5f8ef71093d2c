"""Rows of a quantised matrix as a GGUF file stores them: blocks of codes and scales, row after row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor


class Block(NamedTuple):
    """What a row of a kind consists of."""

    columns: int
    size_bytes: int


BLOCKS: Mapping[str, Block] = MappingProxyType(
    {
        "Q4_0": Block(32, 18),
        "Q4_1": Block(32, 20),
        "Q5_0": Block(32, 22),
        "Q5_1": Block(32, 24),
        "Q8_0": Block(32, 34),
        "Q4_K": Block(256, 144),
        "Q5_K": Block(256, 176),
        "Q6_K": Block(256, 210),
    }
)
PACKED_KINDS = tuple(BLOCKS)
"""GGUF's names of the kinds that can stay packed."""

# Elements de-quantised at once: small enough for the intermediate arrays to stay in cache.
_CHUNK_ELEMENTS = 1 << 17


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A matrix `[rows, cols]`, or some of its rows and columns, as its file has it. Raises ValueError if it is none."""

    kind: str
    """One of PACKED_KINDS."""
    data: Tensor
    """uint8 `[rows, row_bytes]`, on the host; may be mapped from a file, so it is not to be written to."""
    cols: int

    def __post_init__(self) -> None:
        block = BLOCKS.get(self.kind)
        if block is None:
            raise ValueError(f"{self.kind} is no packed kind; there are {', '.join(PACKED_KINDS)}")
        expected = self.cols // block.columns * block.size_bytes
        if self.cols % block.columns or self.data.ndim != 2 or self.data.shape[1] != expected:
            raise ValueError(
                f"{self.cols} columns of {self.kind} (blocks of {block.columns}) are not rows of "
                f"{tuple(self.data.shape)[1:]} bytes"
            )

    @property
    def rows(self) -> int:
        return self.data.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, cols)`, as the de-quantised matrix has it."""
        return self.rows, self.cols

    def __getitem__(self, index: slice | Tensor | tuple[slice | Tensor, slice]) -> PackedRows:
        """`packed[rows]` or `packed[rows, columns]`, as of a tensor; columns without a step.

        rows: a slice (no copy) or an int64 or bool tensor. Raises ValueError where the columns would cut a block.
        """
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        start, stop, step = columns.indices(self.cols)
        block = BLOCKS[self.kind]
        stop = max(start, stop)
        if step != 1 or start % block.columns or stop % block.columns:
            raise ValueError(f"columns {start} to {stop} of {self.cols} cut the {block.columns} of a {self.kind} block")
        first, end = (column // block.columns * block.size_bytes for column in (start, stop))
        return PackedRows(self.kind, self.data[rows][:, first:end], stop - start)

    def dequantise(self) -> Tensor:
        """float32 `[rows, cols]`, by the gguf package."""
        from gguf import quants

        codec = getattr(quants, self.kind)
        size_bytes = BLOCKS[self.kind].size_bytes
        values = torch.empty(self.rows, self.cols)
        data, out = self.data.numpy(), values.numpy()
        step = max(1, _CHUNK_ELEMENTS // max(1, self.cols))
        # Block by block numbers are the same as whole rows; the package's own row loop is half as fast.
        for start in range(0, self.rows, step):
            blocks = data[start : start + step].reshape(-1, size_bytes)
            piece = out[start : start + step]
            piece[...] = codec.dequantize_blocks(blocks).reshape(piece.shape)
        return values
