"""An EAGLE head: one decoder layer that goes on from the target's last hidden states.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024, and with dynamic trees "EAGLE-2:
Faster Inference of Language Models with Dynamic Draft Trees", 2024. For the token at place j it computes from that
token's embedding and from what the target's output projection reads at place j - 1 what that would read at place j. It
has no embeddings and no output projection of its own, and only one norm, before its MLP: the target's last hidden
states are normed, and so are what it learnt to give.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.head import HeadLayer, HeadSpec


class EagleHead:
    """Weights and computation, see Head. Parameters are filled by who makes it."""

    def __init__(self, spec: HeadSpec, target: Decoder, max_position: int) -> None:
        self.spec = spec
        self.layers = (target.spec.num_layers + 1,)
        self.num_ids = target.spec.vocab_size
        self._target = target
        hidden, device, dtype = spec.hidden_size, target.device, target.dtype
        self.fc = torch.zeros(hidden, 2 * hidden, device=device, dtype=dtype)
        self.fc_bias = torch.zeros(hidden, device=device, dtype=dtype)
        """Of zeros for heads without."""
        self.layer = HeadLayer(spec, hidden, target.kernels, device, dtype, max_position)

    @property
    def offsets(self) -> None:
        """See Head: its ids are the target's."""

    def features(self, states: list[Tensor]) -> Tensor:
        """See Head."""
        (last,) = states
        return last

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
        x = self._input(embeds, features)
        queries = self.layer.store(x, positions, locations, kv)
        out, residual = self.layer.rest(queries, x, batch, kv)
        hidden = out + residual
        return self._target.logits(hidden), hidden

    def _input(self, embeds: Tensor, features: Tensor) -> Tensor:
        return self._target.kernels.linear(torch.cat((embeds, features), dim=-1), self.fc, self.fc_bias)

    def parameters(self) -> dict[str, Tensor]:
        """By published names."""
        return {"fc.weight": self.fc, "fc.bias": self.fc_bias, **self.layer.parameters("layers.0.")}
