"""RMS normalisation layers."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from kernels.packed_rows import PackedRows
from scheduler_proc.layers.target import LoadTarget


class RmsNorm:
    """RMS norm over the last dimension, with a weight `[dim]`; whole on every process."""

    def __init__(
        self,
        name: str,
        dim: int,
        eps: float,
        *,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        quantises: bool = False,
    ) -> None:
        """quantises: results are activation rows (kernels/packed.py), for linear layers that take them."""
        self.name = name
        self.weight = torch.ones(dim, device=device, dtype=dtype)
        self._eps = eps
        self._norm = kernels.norm_rows if quantises else kernels.rms_norm
        self._add_norm = kernels.add_norm_rows if quantises else kernels.add_rms_norm

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, dim] -> [num_tokens, dim]`, or activation rows."""
        return self._norm(x, self.weight, self._eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """`(norm(x + residual), x + residual)`; neither argument may be read afterwards."""
        return self._add_norm(x, residual, self.weight, self._eps)

    def parameters(self) -> dict[str, Tensor]:
        return {f"{self.name}.weight": self.weight}

    def targets(self) -> dict[str, LoadTarget]:
        return {f"{self.name}.weight": LoadTarget(tuple(self.weight.shape), self._load, is_norm=True)}

    def _load(self, tensor: Tensor | PackedRows) -> None:
        assert isinstance(tensor, Tensor)
        self.weight.copy_(tensor)
