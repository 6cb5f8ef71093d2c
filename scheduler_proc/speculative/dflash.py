"""A DFlash drafter: a few decoder layers that draft a whole block of tokens in one pass.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026. Keys and values of the text come from the
target's hidden states; those of the block, from the text's last token and masks, all of which see each other. What is
computed at a mask is the token at its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.dispatch import KernelSet
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.speculative.head import HeadSpec


@dataclass(frozen=True)
class DFlashSpec(HeadSpec):
    """Of a drafter, whose layers are alike but for their windows."""

    windows: tuple[int | None, ...]
    """By layer: how far its attention looks back."""
    block_size: int
    """Tokens of a block: the text's last one and those that are drafted."""
    mask_id: int
    """The target's token that stands for what is to be drafted."""
    layers: tuple[int, ...]
    """Of the target: before these its hidden states are taken."""

    @property
    def num_layers(self) -> int:
        return len(self.windows)


class _Layer:
    """Weights of one layer; rows of matrices are outputs."""

    def __init__(self, spec: DFlashSpec, index: int, kernels: KernelSet, device: torch.device, dtype: torch.dtype):
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self.q_size, self.kv_size = spec.num_heads * dim, spec.num_kv_heads * dim

        def empty(*shape: int) -> Tensor:
            return torch.zeros(*shape, device=device, dtype=dtype)

        def norm(name: str) -> RmsNorm:
            name = f"layers.{index}.{name}"
            return RmsNorm(name, hidden, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)

        self.qkv = empty(self.q_size + 2 * self.kv_size, hidden)
        self.o = empty(hidden, self.q_size)
        self.q_norm, self.k_norm = empty(dim), empty(dim)
        self.gate_up, self.down = empty(2 * inner, hidden), empty(hidden, inner)
        self.attn_norm, self.mlp_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        self.attention = AttentionSpec(dim**-0.5, window=spec.windows[index])


class DFlashModel:
    """Weights and computation. Parameters are filled by who makes it."""

    def __init__(
        self, spec: DFlashSpec, kernels: KernelSet, device: torch.device, dtype: torch.dtype, max_position: int
    ) -> None:
        """max_position: positions that will be asked for at most."""
        self.spec = spec
        self.dtype = dtype
        self._kernels = kernels
        hidden = spec.hidden_size
        self.fc = torch.zeros(hidden, len(spec.layers) * hidden, device=device, dtype=dtype)
        self.hidden_norm, self.norm = (
            RmsNorm(name, hidden, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)
            for name in ("hidden_norm", "norm")
        )
        self._layers = [_Layer(spec, index, kernels, device, dtype) for index in range(spec.num_layers)]
        self._cos_sin = cos_sin_cache(spec.rope, spec.head_dim, max_position, device)

    def store(self, states: list[Tensor], positions: Tensor, locations: Tensor, kv: Sequence[Tensor]) -> None:
        """Write keys and values of a text's tokens: states: [num_tokens, hidden] of the target, for each of `layers`;
        positions, locations: int64 [num_tokens]; kv: pages, by layer."""
        features = self._kernels.linear(torch.cat(states, dim=-1).to(self.dtype), self.fc, None)
        features = self.hidden_norm(features)
        # Only keys and values are wanted, but what stores them wants queries, too: those of one head.
        dim = self.spec.head_dim
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            parts = self._kernels.linear(features, layer.qkv[layer.q_size - dim :], None)
            q, k, v = self._heads(parts, [dim, layer.kv_size, layer.kv_size])
            self._store(q, k, v, positions, locations, layer_kv, layer)

    def block(
        self, embeds: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, kv: Sequence[Tensor]
    ) -> Tensor:
        """Hidden states [num_tokens, hidden] of blocks' tokens, for the target's output projection.

        embeds: [num_tokens, hidden]; batch: what each of them sees, as a row of its own; the rest is as for `store`.
        """
        x, residual = embeds.to(self.dtype), None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x, residual = (layer.attn_norm(x), x) if residual is None else layer.attn_norm.add(x, residual)
            parts = self._kernels.linear(x, layer.qkv, None)
            q, k, v = self._heads(parts, [layer.q_size, layer.kv_size, layer.kv_size])
            self._store(q, k, v, positions, locations, layer_kv, layer)
            out = self._kernels.paged_attention(q, layer_kv, batch, layer.attention)
            x, residual = layer.mlp_norm.add(self._kernels.linear(out.flatten(1), layer.o, None), residual)
            x = self._kernels.linear(self._kernels.gated_linear(x, layer.gate_up, None), layer.down, None)
        assert residual is not None, "a drafter without layers"
        return self.norm.add(x, residual)[0]

    def _heads(self, x: Tensor, sizes: list[int]) -> list[Tensor]:
        return [part.unflatten(-1, (-1, self.spec.head_dim)) for part in x.split(sizes, dim=-1)]

    def _store(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, locations: Tensor, kv: Tensor, layer: _Layer
    ) -> None:
        eps, norms = self.spec.norm_eps, (layer.q_norm, layer.k_norm)
        self._kernels.rope_store(q, k, v, positions, self._cos_sin, kv, locations, *norms, eps)

    def parameters(self) -> dict[str, Tensor]:
        """By published names; parts of what is stored."""
        inner = self.spec.intermediate_size
        places = {"fc.weight": self.fc, "hidden_norm.weight": self.hidden_norm.weight, "norm.weight": self.norm.weight}
        for index, layer in enumerate(self._layers):
            name, q, k = f"layers.{index}", layer.q_size, layer.q_size + layer.kv_size
            places |= {
                f"{name}.self_attn.q_proj.weight": layer.qkv[:q],
                f"{name}.self_attn.k_proj.weight": layer.qkv[q:k],
                f"{name}.self_attn.v_proj.weight": layer.qkv[k:],
                f"{name}.self_attn.o_proj.weight": layer.o,
                f"{name}.self_attn.q_norm.weight": layer.q_norm,
                f"{name}.self_attn.k_norm.weight": layer.k_norm,
                f"{name}.mlp.gate_proj.weight": layer.gate_up[:inner],
                f"{name}.mlp.up_proj.weight": layer.gate_up[inner:],
                f"{name}.mlp.down_proj.weight": layer.down,
                f"{name}.input_layernorm.weight": layer.attn_norm.weight,
                f"{name}.post_attention_layernorm.weight": layer.mlp_norm.weight,
            }
        return places
