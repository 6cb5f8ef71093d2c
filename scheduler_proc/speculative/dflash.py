"""A DFlash drafter: a few decoder layers that draft a whole block of tokens in one pass.

Chen et al., "DFlash: Block Diffusion for Flash Speculative Decoding", 2026. Keys and values of the text come from the
target's hidden states; those of the block, from the text's last token and masks, all of which see each other. What is
computed at a mask is the token at its own place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.head import HeadSpec, LayerMaker, unused_queries


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
    """Weights of one layer."""

    def __init__(self, spec: DFlashSpec, index: int, make: LayerMaker) -> None:
        self.name = name = f"layers.{index}"
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        q_size, kv_size = spec.num_heads * dim, spec.num_kv_heads * dim
        self.sizes = [q_size, kv_size, kv_size]
        """Of queries, keys and values."""
        self.qkv = make.linear("qkv", {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}, hidden)
        self.o = make.linear("o", {"o_proj": hidden}, q_size)
        self.gate_up = make.linear("gate_up", {"gate_proj": inner, "up_proj": inner}, hidden)
        self.down = make.linear("down", {"down_proj": hidden}, inner)
        self.q_norm, self.k_norm = (make.norm(f"{name}.self_attn.{part}_norm", dim) for part in "qk")
        self.attn_norm = make.norm(f"{name}.input_layernorm", hidden, before_linear=True)
        self.mlp_norm = make.norm(f"{name}.post_attention_layernorm", hidden, before_linear=True)
        self.attention = AttentionSpec(dim**-0.5, window=spec.windows[index])

    def targets(self) -> dict[str, LoadTarget]:
        attention, mlp = f"{self.name}.self_attn", f"{self.name}.mlp"
        found = self.qkv.targets(attention) | self.o.targets(attention)
        found |= self.gate_up.targets(mlp) | self.down.targets(mlp)
        for norm in (self.q_norm, self.k_norm, self.attn_norm, self.mlp_norm):
            found |= norm.targets()
        return found


class DFlashModel:
    """Weights and computation, by operations alone, so that a pass can be recorded (kernels.cpu.program). Weights are
    loaded by who makes it."""

    def __init__(self, spec: DFlashSpec, target: Decoder, max_position: int) -> None:
        """max_position: positions that will be asked for at most."""
        self.spec = spec
        self._dtype = target.dtype
        self._kernels = target.kernels
        hidden, make = spec.hidden_size, LayerMaker(target, spec.norm_eps)
        self._unused_queries = unused_queries(spec.head_dim, make)
        self._fc = make.linear("fc", {"fc": hidden}, len(spec.layers) * hidden)
        self._hidden_norm = make.norm("hidden_norm", hidden, before_linear=True)
        self._norm = make.norm("norm", hidden)
        self._layers = [_Layer(spec, index, make) for index in range(spec.num_layers)]
        self._cos_sin = cos_sin_cache(spec.rope, spec.head_dim, max_position, target.device)

    def store(self, states: list[Tensor], positions: Tensor, locations: Tensor, kv: Sequence[Tensor]) -> None:
        """Write keys and values of a text's tokens: states: [num_tokens, hidden] of the target, for each of `layers`;
        positions, locations: int64 [num_tokens]; kv: pages, by layer."""
        features = self._hidden_norm(self._fc(self._kernels.concat(states).to(self._dtype)))
        unused = self._unused_queries
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            q_size, *kv_sizes = layer.sizes
            parts = layer.qkv.outputs_from(features, q_size - unused)
            self._store(parts, [unused, *kv_sizes], positions, locations, layer_kv, layer)

    def block(
        self, embeds: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, kv: Sequence[Tensor]
    ) -> Tensor:
        """Hidden states [num_tokens, hidden] of blocks' tokens, for the target's output projection.

        embeds: [num_tokens, hidden]; batch: what each of them sees, as a row of its own; the rest is as for `store`.
        """
        x, residual = embeds.to(self._dtype), None
        for layer, layer_kv in zip(self._layers, kv, strict=True):
            x, residual = (layer.attn_norm(x), x) if residual is None else layer.attn_norm.add(x, residual)
            q = self._store(layer.qkv(x), layer.sizes, positions, locations, layer_kv, layer)
            out = self._kernels.paged_attention(q, layer_kv, batch, layer.attention)
            x, residual = layer.mlp_norm.add(layer.o(out.flatten(1)), residual)
            x = layer.down(layer.gate_up.gated(x))
        assert residual is not None, "a drafter without layers"
        return self._norm.add(x, residual)[0]

    def _store(
        self, parts: Tensor, sizes: list[int], positions: Tensor, locations: Tensor, kv: Tensor, layer: _Layer
    ) -> Tensor:
        """Write keys and values of parts, which are queries, keys and values of these sizes; returns the queries."""
        dim, eps, norms = self.spec.head_dim, self.spec.norm_eps, (layer.q_norm.weight, layer.k_norm.weight)
        q, k, v = (part.unflatten(-1, (part.shape[-1] // dim, dim)) for part in parts.split(sizes, dim=-1))
        self._kernels.rope_store(q, k, v, positions, self._cos_sin, kv, locations, *norms, eps)
        return q

    def targets(self) -> dict[str, LoadTarget]:
        """What to load, by published names."""
        found = self._fc.targets("") | self._hidden_norm.targets() | self._norm.targets()
        for layer in self._layers:
            found |= layer.targets()
        return found
