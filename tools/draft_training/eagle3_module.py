"""An EAGLE-3 head that learns: the computation of scheduler_proc/speculative/eagle3.py, dense and differentiable.

What it drafts feeds on its own features, so it is trained on them: from every place of a text it is unrolled for some
steps, each on the tokens that really came and on the features of the step before (Li et al., "EAGLE-3", 2025,
training-time test).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.speculative.eagle3 import Eagle3Spec
from tools.draft_training.module_parts import random_matrix, rms, rotated


class Eagle3Module(nn.Module):
    """Parameters under their published names, but for the dots."""

    def __init__(self, spec: Eagle3Spec, max_position: int, seed: int = 0) -> None:
        super().__init__()
        self.spec = spec
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        generator = torch.Generator().manual_seed(seed)

        def matrix(out_dim: int, in_dim: int) -> nn.Parameter:
            return random_matrix(out_dim, in_dim, generator)

        def ones() -> nn.Parameter:
            return nn.Parameter(torch.ones(hidden))

        self.fc = matrix(hidden, len(spec.layers) * hidden)
        self.q, self.k, self.v = (
            matrix(heads * dim, 2 * hidden) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        self.o = matrix(hidden, spec.num_heads * dim)
        self.gate, self.up, self.down = matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
        self.embed_norm, self.hidden_norm, self.mlp_norm, self.norm = ones(), ones(), ones(), ones()
        self.lm_head = matrix(spec.draft_vocab_size, hidden)
        self.scales: Tensor
        """What hidden states are divided by, float32 [layers * hidden]: a part of `fc` where that is published."""
        self.register_buffer("scales", torch.ones(len(spec.layers) * hidden))
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", cos_sin_cache(spec.rope, dim, max_position, torch.device("cpu")))

    def forward(self, embeds: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        """Logits [batch, length - d, draft_vocab] of depths d = 0 to depth - 1: at place p, of the token at p + d + 1.

        embeds: [batch, length, hidden], the target's; states: [batch, length, layers * hidden], its hidden states.
        """
        features = ((states / self.scales) @ self.fc.T).float()
        before = F.pad(features[:, :-1], (0, 0, 1, 0))
        length = embeds.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=embeds.device).tril()
        base_keys, base_values = self._keys(embeds, before, 0)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found: list[Tensor] = []
        hidden = before
        for ahead in range(depth):
            # At place p: the token at p + ahead, and what the steps before have made of the text up to p.
            size = length - ahead
            token, hidden = embeds[:, ahead:], hidden[:, :size]
            if ahead:
                own_keys, own_values = self._keys(token, hidden, ahead)
                keys, values = [part[:, :, :size] for part in keys], [part[:, :, :size] for part in values]
                keys.append(own_keys)
                values.append(own_values)
            query = self._heads(self._input(token, hidden) @ self.q.T, self.spec.num_heads, ahead)
            out = self._attend(query, base_keys, base_values, causal[:size], keys, values)
            residual = hidden + out @ self.o.T
            x = self._rms(residual, self.mlp_norm)
            hidden = residual + (F.silu(x @ self.gate.T) * (x @ self.up.T)) @ self.down.T
            found.append(self._rms(hidden, self.norm) @ self.lm_head.T)
        return found

    def _input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return torch.cat((self._rms(embeds, self.embed_norm), self._rms(hidden, self.hidden_norm)), dim=-1)

    def _rms(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, weight, self.spec.norm_eps)

    def _keys(self, embeds: Tensor, hidden: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """[batch, heads, length, head_dim] each, heads repeated for the queries that share them."""
        x, kv_heads = self._input(embeds, hidden), self.spec.num_kv_heads
        keys = self._heads(x @ self.k.T, kv_heads, ahead)
        values = (x @ self.v.T).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
        group = self.spec.num_heads // kv_heads
        return keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)

    def _heads(self, x: Tensor, num_heads: int, ahead: int) -> Tensor:
        """Rotated by their places: those of `ahead` and after."""
        x = x.unflatten(-1, (num_heads, -1)).transpose(1, 2)
        return rotated(x, self.cos_sin[ahead : ahead + x.shape[2]])

    def _attend(
        self,
        query: Tensor,
        base_keys: Tensor,
        base_values: Tensor,
        seen: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        """Each place sees the text up to itself, and its own steps so far."""
        scores = (query @ base_keys.transpose(-1, -2)).masked_fill(~seen, -torch.inf)
        own = [(query * key).sum(dim=-1, keepdim=True) for key in keys]
        weights = (torch.cat((scores, *own), dim=-1) * self.spec.head_dim**-0.5).float().softmax(dim=-1).to(query.dtype)
        length = base_keys.shape[2]
        out = weights[..., :length] @ base_values
        for index, value in enumerate(values):
            out = out + weights[..., length + index : length + index + 1] * value
        return out.transpose(1, 2).flatten(2)

    def published(self, d2t: Tensor) -> dict[str, Tensor]:
        """Tensors by published names; d2t: int64 [draft_vocab], what ids of target and draft differ by."""
        layer = "midlayer."
        return {
            "fc.weight": self.fc / self.scales,
            f"{layer}self_attn.q_proj.weight": self.q,
            f"{layer}self_attn.k_proj.weight": self.k,
            f"{layer}self_attn.v_proj.weight": self.v,
            f"{layer}self_attn.o_proj.weight": self.o,
            f"{layer}mlp.gate_proj.weight": self.gate,
            f"{layer}mlp.up_proj.weight": self.up,
            f"{layer}mlp.down_proj.weight": self.down,
            f"{layer}input_layernorm.weight": self.embed_norm,
            f"{layer}hidden_norm.weight": self.hidden_norm,
            f"{layer}post_attention_layernorm.weight": self.mlp_norm,
            "norm.weight": self.norm,
            "lm_head.weight": self.lm_head,
            "d2t": d2t,
        }
