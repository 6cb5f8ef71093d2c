"""Packed: weights kept as their file packs them, in the tiles of the CPU kernels."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kernels.cpu.matrix import Arena, PackedLinear, PackedMatrix, pack
from kernels.dispatch import KernelSet
from kernels.packed_rows import PackedRows


@dataclass(frozen=True)
class Packed:
    """Packed rows stay in their kind; floats are packed to int8 in groups of 32. Activations are float32."""

    kernels: KernelSet
    arena: Arena = field(default_factory=Arena)
    takes_packed: bool = field(default=True, init=False)
    quantises: bool = field(default=True, init=False)

    def create(self, out_dim: int, in_dim: int, bias: bool, device: torch.device, dtype: torch.dtype) -> PackedWeight:
        return PackedWeight(self.kernels, self.arena, out_dim, torch.zeros(out_dim) if bias else None)


class PackedWeight:
    """The matrices of one layer, one for each part that was loaded. Applied only when all are there."""

    def __init__(self, kernels: KernelSet, arena: Arena, out_dim: int, bias: Tensor | None) -> None:
        self._kernels = kernels
        self._arena = arena
        self._out_dim = out_dim
        self._bias = bias
        self._parts: dict[int, PackedMatrix] = {}
        """By first output row."""
        self._layers_from: dict[int, PackedLinear] = {}
        """What was applied of the layer alone, by first output row."""

    def load(self, name: str, rows: slice, value: Tensor | PackedRows) -> None:
        if name == "weight":
            self._parts[rows.start] = pack(value, self._arena)
        else:
            assert self._bias is not None and isinstance(value, Tensor)
            self._bias[rows].copy_(value)

    def parameters(self) -> dict[str, Tensor]:
        """Tiles by first output row; bias float32."""
        found = {f"weight.{start}": matrix.data for start, matrix in sorted(self._parts.items())}
        return found if self._bias is None else found | {"bias": self._bias}

    def packings(self) -> list[str]:
        """The packing of each part."""
        return [matrix.packing.name for _, matrix in sorted(self._parts.items())]

    def apply(self, x: Tensor) -> Tensor:
        """x: activation rows, or float32, which is quantised first."""
        return self._kernels.packed_linear(self._layer, self._rows(x))

    def apply_from(self, x: Tensor, start: int) -> Tensor:
        layer = self._layers_from.get(start)
        if layer is None:
            assert start in self._parts, "a matrix is applied as a whole"
            layer = self._layers_from[start] = self._layer_from(start)
        return self._kernels.packed_linear(layer, self._rows(x))

    def apply_gated(self, x: Tensor) -> Tensor:
        return self._kernels.packed_gated_linear(self._layer, x)

    def lookup(self, ids: Tensor) -> Tensor:
        return self._kernels.packed_embed(self._layer.matrices[0], ids)

    @cached_property
    def _layer(self) -> PackedLinear:
        return self._layer_from(0)

    def _layer_from(self, start: int) -> PackedLinear:
        matrices = [matrix for begin, matrix in sorted(self._parts.items()) if begin >= start]
        layer = PackedLinear(matrices, None if self._bias is None else self._bias[start:])
        assert layer.out_dim == self._out_dim - start, "a part of the layer was not loaded"
        return layer

    def _rows(self, x: Tensor) -> Tensor:
        return x if x.dtype == torch.uint8 else self._kernels.quantise_rows(x)
