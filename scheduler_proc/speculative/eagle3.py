"""An EAGLE-3 head: one decoder layer that drafts from the target's hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. What it
computes for the token at place j it computes from that token's embedding and from the target's hidden states at place
j - 1, so its keys and values, too, follow from the tokens up to their place alone, and pages of a common prefix hold
the head's as they hold the target's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_files.types import RopeConfig
from kernels.attention import AttentionBatch, AttentionSpec
from kernels.dispatch import KernelSet
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.rotary import cos_sin_cache


@dataclass(frozen=True)
class Eagle3Spec:
    """Of a head."""

    hidden_size: int
    """Of the head and of its target alike."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    draft_vocab_size: int
    layers: tuple[int, ...]
    """Of the target: before these its hidden states are taken."""


class Eagle3Head:
    """Weights and computation; rows of matrices are outputs. Parameters are filled by who makes it."""

    def __init__(
        self,
        spec: Eagle3Spec,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int,
    ) -> None:
        self.spec = spec
        self._kernels = kernels
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self._sizes = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]

        def empty(out_dim: int, in_dim: int) -> Tensor:
            return torch.zeros(out_dim, in_dim, device=device, dtype=dtype)

        def norm(name: str) -> RmsNorm:
            return RmsNorm(name, hidden, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)

        self.fc = empty(hidden, len(spec.layers) * hidden)
        self.qkv = empty(sum(self._sizes), 2 * hidden)
        self.o = empty(hidden, spec.num_heads * dim)
        self.gate_up = empty(2 * inner, hidden)
        self.down = empty(hidden, inner)
        self.lm_head = empty(spec.draft_vocab_size, hidden)
        self.d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64, device=device)
        """What a draft's id and its target's differ by."""
        self.embed_norm, self.hidden_norm = norm("input_layernorm"), norm("hidden_norm")
        self.mlp_norm, self.norm = norm("post_attention_layernorm"), norm("norm")
        self._cos_sin = cos_sin_cache(spec.rope, dim, max_position, device)
        self._attention = AttentionSpec(dim**-0.5)

    def features(self, states: list[Tensor]) -> Tensor:
        """[num_tokens, hidden] of the target's hidden states, one tensor for each of `layers`."""
        return self._kernels.linear(torch.cat(states, dim=-1).to(self.fc.dtype), self.fc, None)

    def store(self, embeds: Tensor, features: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> Tensor:
        """Write keys and values of tokens: embeds, features [num_tokens, hidden], the features of who came before;
        positions, locations int64 [num_tokens]; kv: the head's pages. Returns the queries."""
        x = torch.cat((self.embed_norm(embeds.to(self.fc.dtype)), self.hidden_norm(features)), dim=-1)
        parts = self._kernels.linear(x, self.qkv, None).split(self._sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.spec.head_dim)) for part in parts)
        self._kernels.rope_store(q, k, v, positions, self._cos_sin, kv, locations, None, None, self.spec.norm_eps)
        return q

    def next(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        locations: Tensor,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What comes after tokens: logits [num_tokens, draft_vocab], and features for who comes next."""
        q = self.store(embeds, features, positions, locations, kv)
        out = self._kernels.paged_attention(q, kv, batch, self._attention)
        x, residual = self.mlp_norm.add(self._kernels.linear(out.flatten(1), self.o, None), features.clone())
        x = self._kernels.linear(self._kernels.gated_linear(x, self.gate_up, None), self.down, None)
        normed, hidden = self.norm.add(x, residual)
        return self._kernels.linear(normed, self.lm_head, None), hidden

    def targets(self) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], object]]]:
        """By published names: shapes, and what takes the tensors."""
        spec, hidden = self.spec, self.spec.hidden_size
        q, k, _ = self._sizes
        inner = spec.intermediate_size
        layer = "midlayer."
        places = {
            "fc.weight": self.fc,
            f"{layer}self_attn.q_proj.weight": self.qkv[:q],
            f"{layer}self_attn.k_proj.weight": self.qkv[q : q + k],
            f"{layer}self_attn.v_proj.weight": self.qkv[q + k :],
            f"{layer}self_attn.o_proj.weight": self.o,
            f"{layer}mlp.gate_proj.weight": self.gate_up[:inner],
            f"{layer}mlp.up_proj.weight": self.gate_up[inner:],
            f"{layer}mlp.down_proj.weight": self.down,
            f"{layer}input_layernorm.weight": self.embed_norm.weight,
            f"{layer}hidden_norm.weight": self.hidden_norm.weight,
            f"{layer}post_attention_layernorm.weight": self.mlp_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head,
            "d2t": self.d2t,
        }
        assert hidden == self.fc.shape[0]
        return {name: (tuple(place.shape), place.copy_) for name, place in places.items()}
