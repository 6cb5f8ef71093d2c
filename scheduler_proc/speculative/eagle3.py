"""An EAGLE-3 head: one decoder layer that drafts from the target's hidden states.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025. What it
computes for the token at place j it computes from that token's embedding and from the target's hidden states at place
j - 1, so its keys and values, too, follow from the tokens up to their place alone, and pages of a common prefix hold
the head's as they hold the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.dispatch import KernelSet
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.speculative.head import HeadLayer, HeadSpec


@dataclass(frozen=True)
class Eagle3Spec(HeadSpec):
    """Of a head."""

    draft_vocab_size: int
    layers: tuple[int, ...]
    """Of the target: before these its hidden states are taken."""


class Eagle3Head:
    """Weights and computation, see Head. Parameters are filled by who makes it."""

    def __init__(
        self,
        spec: Eagle3Spec,
        kernels: KernelSet,
        device: torch.device,
        dtype: torch.dtype,
        max_position: int,
    ) -> None:
        self.spec = spec
        self.layers = spec.layers
        self.num_ids = spec.draft_vocab_size
        self._kernels = kernels
        hidden = spec.hidden_size

        def norm(name: str) -> RmsNorm:
            return RmsNorm(name, hidden, spec.norm_eps, kernels=kernels, device=device, dtype=dtype)

        self.fc = torch.zeros(hidden, len(spec.layers) * hidden, device=device, dtype=dtype)
        self.layer = HeadLayer(spec, 2 * hidden, kernels, device, dtype, max_position)
        self.lm_head = torch.zeros(spec.draft_vocab_size, hidden, device=device, dtype=dtype)
        self.d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64, device=device)
        """What a draft's id and its target's differ by."""
        self.embed_norm, self.hidden_norm, self.norm = norm("input_layernorm"), norm("hidden_norm"), norm("norm")

    @property
    def offsets(self) -> Tensor:
        """See Head."""
        return self.d2t

    def features(self, states: list[Tensor]) -> Tensor:
        """See Head."""
        return self._kernels.linear(torch.cat(states, dim=-1).to(self.fc.dtype), self.fc, None)

    def store(self, embeds: Tensor, features: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> None:
        """See Head."""
        self.layer.store(self._input(embeds, features), positions, locations, kv)

    def next(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        locations: Tensor,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """See Head."""
        queries = self.layer.store(self._input(embeds, features), positions, locations, kv)
        x, residual = self.layer.rest(queries, features.clone(), batch, kv)
        normed, hidden = self.norm.add(x, residual)
        return self._kernels.linear(normed, self.lm_head, None), hidden

    def _input(self, embeds: Tensor, features: Tensor) -> Tensor:
        return torch.cat((self.embed_norm(embeds.to(self.fc.dtype)), self.hidden_norm(features)), dim=-1)

    def parameters(self) -> dict[str, Tensor]:
        """By published names."""
        layer = "midlayer."
        return {
            "fc.weight": self.fc,
            **self.layer.parameters(layer),
            f"{layer}input_layernorm.weight": self.embed_norm.weight,
            f"{layer}hidden_norm.weight": self.hidden_norm.weight,
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head,
            "d2t": self.d2t,
        }
