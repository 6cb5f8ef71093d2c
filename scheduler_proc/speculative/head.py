"""What the EAGLE heads have in common: the interface to the drafter, and the one decoder layer that they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.model_files.types import RopeConfig
from kernels.attention import AttentionBatch, AttentionSpec
from kernels.dispatch import KernelSet
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.rotary import cos_sin_cache


@dataclass(frozen=True)
class HeadSpec:
    """Of a head's layer."""

    hidden_size: int
    """Of the head and of its target alike."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig


class Head(Protocol):
    """Drafts from its target's hidden states. Features, [num_tokens, hidden] in the target's dtype, are what it takes
    of the place before a token, and what it makes for the place after it."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target: before these its hidden states are taken, as Follower.layers says."""
        ...

    @property
    def num_ids(self) -> int:
        """How many tokens it can draft."""
        ...

    @property
    def offsets(self) -> Tensor | None:
        """int64 [num_ids]: what the target's ids differ by from the head's; None: nothing."""
        ...

    def features(self, states: list[Tensor]) -> Tensor:
        """Of the target's hidden states [num_tokens, hidden], one tensor for each of `layers`."""
        ...

    def store(self, embeds: Tensor, features: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> None:
        """Write keys and values of tokens: embeds, features [num_tokens, hidden], the features of who came before;
        positions, locations int64 [num_tokens]; kv: the head's pages."""
        ...

    def next(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        locations: Tensor,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What comes after tokens: logits [num_tokens, num_ids], and features for who comes next."""
        ...


class HeadLayer:
    """Attention and MLP, but for the norm before them; rows of matrices are outputs."""

    def __init__(
        self,
        spec: HeadSpec,
        in_dim: int,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int,
    ) -> None:
        """in_dim: of what attention reads."""
        self._spec = spec
        self._kernels = kernels
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self._sizes = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]

        def zeros(out_dim: int, in_dim: int) -> Tensor:
            return torch.zeros(out_dim, in_dim, device=device, dtype=dtype)

        self.qkv = zeros(sum(self._sizes), in_dim)
        self.o = zeros(hidden, spec.num_heads * dim)
        self.gate_up = zeros(2 * inner, hidden)
        self.down = zeros(hidden, inner)
        self.mlp_norm = RmsNorm(
            "post_attention_layernorm", hidden, spec.norm_eps, kernels=kernels, device=device, dtype=dtype
        )
        self._cos_sin = cos_sin_cache(spec.rope, dim, max_position, device)
        self._attention = AttentionSpec(dim**-0.5)

    def store(self, x: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> Tensor:
        """Write keys and values of x [num_tokens, in_dim]; the rest is as for Head.store. Returns the queries."""
        parts = self._kernels.linear(x, self.qkv, None).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self._spec.head_dim)) for part in parts)
        self._kernels.rope_store(q, k, v, positions, self._cos_sin, kv, locations, None, None, self._spec.norm_eps)
        return q

    def rest(self, queries: Tensor, residual: Tensor, batch: AttentionBatch, kv: Tensor) -> tuple[Tensor, Tensor]:
        """What the MLP gives, and what that is to be added to; residual may not be read afterwards."""
        out = self._kernels.paged_attention(queries, kv, batch, self._attention)
        x, residual = self.mlp_norm.add(self._kernels.linear(out.flatten(1), self.o, None), residual)
        return self._kernels.linear(self._kernels.gated_linear(x, self.gate_up, None), self.down, None), residual

    def parameters(self, prefix: str) -> dict[str, Tensor]:
        """By published names behind a prefix."""
        q, k, _ = self._sizes
        inner = self._spec.intermediate_size
        return {
            f"{prefix}self_attn.q_proj.weight": self.qkv[:q],
            f"{prefix}self_attn.k_proj.weight": self.qkv[q : q + k],
            f"{prefix}self_attn.v_proj.weight": self.qkv[q + k :],
            f"{prefix}self_attn.o_proj.weight": self.o,
            f"{prefix}mlp.gate_proj.weight": self.gate_up[:inner],
            f"{prefix}mlp.up_proj.weight": self.gate_up[inner:],
            f"{prefix}mlp.down_proj.weight": self.down,
            f"{prefix}post_attention_layernorm.weight": self.mlp_norm.weight,
        }
