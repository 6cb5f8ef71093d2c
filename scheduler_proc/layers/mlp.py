"""The gated MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from scheduler_proc.layers.linear import Linear, LinearMethod, Part
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.spec import DecoderSpec
from scheduler_proc.parallel.group import Group


class GatedMlp:
    """`down(silu(gate(x)) * up(x))` with gate and up fused."""

    def __init__(
        self,
        name: str,
        spec: DecoderSpec,
        *,
        kernels: KernelSet,
        method: LinearMethod,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._name = name
        self._kernels = kernels
        inner = spec.intermediate_size
        self._gate_up = Linear(
            f"{name}.gate_up",
            (Part("gate", inner, 1), Part("up", inner, 1)),
            spec.hidden_size,
            bias=spec.mlp_bias,
            split="out",
            method=method,
            group=group,
            device=device,
            dtype=dtype,
        )
        self._down = Linear(
            f"{name}.down",
            (Part("down", 1, spec.hidden_size),),
            inner,
            bias=spec.mlp_bias,
            split="in",
            method=method,
            group=group,
            device=device,
            dtype=dtype,
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden] -> [num_tokens, hidden]`."""
        return self._down(self._gate_up.gated(x))

    def parameters(self) -> dict[str, Tensor]:
        return self._gate_up.parameters() | self._down.parameters()

    def targets(self) -> dict[str, LoadTarget]:
        return self._gate_up.targets(self._name) | self._down.targets(self._name)
