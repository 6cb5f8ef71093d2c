"""Grouped-query self-attention over paged keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.dispatch import KernelSet
from scheduler_proc.layers.linear import Linear, LinearMethod, Part
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.spec import DecoderSpec
from scheduler_proc.parallel.group import Group


class Attention:
    """qkv projection, optional norms of queries and keys per head, rotary, paged attention, output projection."""

    def __init__(
        self,
        name: str,
        spec: DecoderSpec,
        window: int | None,
        *,
        kernels: KernelSet,
        method: LinearMethod,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._name = name
        self._kernels = kernels
        self._head_dim = spec.head_dim
        self._spec = AttentionSpec(spec.head_dim**-0.5, window)
        self._norm_eps = spec.norm_eps
        dim = spec.head_dim
        heads = (Part("q", spec.num_heads, dim), Part("k", spec.num_kv_heads, dim), Part("v", spec.num_kv_heads, dim))
        self._qkv = Linear(
            f"{name}.qkv",
            heads,
            spec.hidden_size,
            bias=spec.qkv_bias,
            split="out",
            method=method,
            group=group,
            device=device,
            dtype=dtype,
        )
        self._o = Linear(
            f"{name}.o",
            (Part("o", 1, spec.hidden_size),),
            spec.num_heads * dim,
            bias=spec.o_bias,
            split="in",
            method=method,
            group=group,
            device=device,
            dtype=dtype,
        )
        self._q_norm: RmsNorm | None = None
        self._k_norm: RmsNorm | None = None
        if spec.qk_norm:
            self._q_norm = RmsNorm(f"{name}.q_norm", dim, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)
            self._k_norm = RmsNorm(f"{name}.k_norm", dim, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        batch: AttentionBatch,
        locations: Tensor,
        kv: Tensor,
    ) -> Tensor:
        """`[num_tokens, hidden] -> [num_tokens, hidden]`; writes this step's keys and values into kv first."""
        parts = self._qkv(x).split(self._qkv.out_sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self._head_dim)) for part in parts)
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (self._q_norm, self._k_norm))
        self._kernels.rope_store(q, k, v, positions, cos_sin_cache, kv, locations, q_norm, k_norm, self._norm_eps)
        out = self._kernels.paged_attention(q, kv, batch, self._spec)
        return self._o(out.flatten(1))

    def parameters(self) -> dict[str, Tensor]:
        found = self._qkv.parameters() | self._o.parameters()
        for norm in self._norms():
            found |= norm.parameters()
        return found

    def targets(self) -> dict[str, LoadTarget]:
        found = self._qkv.targets(self._name) | self._o.targets(self._name)
        for norm in self._norms():
            found |= norm.targets()
        return found

    def _norms(self) -> list[RmsNorm]:
        return [norm for norm in (self._q_norm, self._k_norm) if norm is not None]
