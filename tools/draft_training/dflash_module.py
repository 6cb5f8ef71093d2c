"""A DFlash drafter that learns: the computation of scheduler_proc/speculative/dflash.py, dense and differentiable.

It is trained on blocks from many places of a text at once, each of which sees the text before it and itself (Chen et
al., "DFlash", 2026).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.speculative.dflash import DFlashSpec
from tools.draft_training.module_parts import random_matrix, rms, rotated


class _Layer(nn.Module):
    def __init__(self, spec: DFlashSpec, generator: torch.Generator) -> None:
        super().__init__()
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size

        def matrix(out_dim: int, in_dim: int) -> nn.Parameter:
            return random_matrix(out_dim, in_dim, generator)

        self.q, self.k, self.v = (
            matrix(heads * dim, hidden) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.o = matrix(hidden, spec.num_heads * dim)
        self.gate, self.up, self.down = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
        self.q_norm, self.k_norm = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.attn_norm, self.mlp_norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))

    def published(self, prefix: str) -> dict[str, Tensor]:
        """Tensors by published names."""
        return {
            f"{prefix}.self_attn.q_proj.weight": self.q,
            f"{prefix}.self_attn.k_proj.weight": self.k,
            f"{prefix}.self_attn.v_proj.weight": self.v,
            f"{prefix}.self_attn.o_proj.weight": self.o,
            f"{prefix}.self_attn.q_norm.weight": self.q_norm,
            f"{prefix}.self_attn.k_norm.weight": self.k_norm,
            f"{prefix}.mlp.gate_proj.weight": self.gate,
            f"{prefix}.mlp.up_proj.weight": self.up,
            f"{prefix}.mlp.down_proj.weight": self.down,
            f"{prefix}.input_layernorm.weight": self.attn_norm,
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm,
        }


class DFlashModule(nn.Module):
    """Parameters in float32. Windows are not known here."""

    def __init__(self, spec: DFlashSpec, max_position: int, seed: int = 0) -> None:
        super().__init__()
        assert not any(spec.windows), "a drafter with windows is not trained here"
        self.spec = spec
        hidden, num_states = spec.hidden_size, len(spec.layers) * spec.hidden_size
        generator = torch.Generator().manual_seed(seed)
        self.fc = random_matrix(hidden, num_states, generator)
        self.hidden_norm, self.norm = nn.Parameter(torch.ones(hidden)), nn.Parameter(torch.ones(hidden))
        self.stack = nn.ModuleList(_Layer(spec, generator) for _ in range(spec.num_layers))
        self.scales: Tensor
        """What hidden states are divided by, float32 [layers * hidden]: a part of `fc` where that is published."""
        self.register_buffer("scales", torch.ones(num_states))
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", cos_sin_cache(spec.rope, spec.head_dim, max_position, torch.device("cpu")))

    def forward(self, embeds: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """[batch, blocks, size, hidden], for the target's output projection.

        embeds: [batch, blocks, size, hidden] of blocks' tokens; states: [batch, length, layers * hidden], the target's
        hidden states; anchors: int64 [batch, blocks], the place of each block's first token in its text.
        """
        batch, blocks, size, hidden = embeds.shape
        length = states.shape[1]
        features = self._rms((states / self.scales) @ self.fc.T, self.hidden_norm)
        step = torch.arange(size, device=embeds.device)
        own = (anchors.unsqueeze(2) + step).view(batch, blocks * size)
        text = torch.arange(length, device=embeds.device)
        # A block's tokens see the text before it, and each other.
        sees_text = text < anchors.repeat_interleave(size, dim=1).unsqueeze(2)
        block = torch.arange(blocks, device=embeds.device).repeat_interleave(size)
        sees_own = (block.unsqueeze(1) == block).expand(batch, -1, -1)
        mask = torch.cat((sees_text, sees_own), dim=2).unsqueeze(1)
        x = embeds.reshape(batch, blocks * size, hidden).float()
        group = self.spec.num_heads // self.spec.num_kv_heads
        for layer in self.stack:
            assert isinstance(layer, _Layer)
            normed = self._rms(x, layer.attn_norm)
            both = torch.cat((features.to(normed.dtype), normed), dim=1)
            places = torch.cat((text.expand(batch, -1), own), dim=1)
            query = self._rotated(self._rms(self._heads(normed @ layer.q.T), layer.q_norm), own)
            keys = self._rotated(self._rms(self._heads(both @ layer.k.T), layer.k_norm), places)
            values = self._heads(both @ layer.v.T)
            keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
            out = F.scaled_dot_product_attention(query, keys.to(query.dtype), values.to(query.dtype), attn_mask=mask)
            x = x + out.transpose(1, 2).flatten(2) @ layer.o.T
            normed = self._rms(x, layer.mlp_norm)
            x = x + (F.silu(normed @ layer.gate.T) * (normed @ layer.up.T)) @ layer.down.T
        return self._rms(x, self.norm).view(batch, blocks, size, hidden)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, weight, self.spec.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, heads, length, head_dim]"""
        return x.unflatten(-1, (-1, self.spec.head_dim)).transpose(1, 2)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        """By places, int64 [batch, length]."""
        return rotated(x, self.cos_sin[places].unsqueeze(1))

    def published(self) -> dict[str, Tensor]:
        """Tensors by published names."""
        tensors: dict[str, Tensor] = {
            "fc.weight": self.fc / self.scales,
            "hidden_norm.weight": self.hidden_norm,
            "norm.weight": self.norm,
        }
        for index, layer in enumerate(self.stack):
            assert isinstance(layer, _Layer)
            tensors |= layer.published(f"layers.{index}")
        return tensors
