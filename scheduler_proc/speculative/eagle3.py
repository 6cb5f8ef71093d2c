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
from kernels.packed_rows import PackedRows
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.head import HeadLayer, HeadSpec, LayerMaker

_LAYER = "midlayer"


@dataclass(frozen=True)
class Eagle3Spec(HeadSpec):
    """Of a head."""

    draft_vocab_size: int
    layers: tuple[int, ...]
    """Of the target: before these its hidden states are taken."""


class Eagle3Head:
    """Weights and computation, see Head. Weights are loaded by who makes it."""

    def __init__(self, spec: Eagle3Spec, target: Decoder, max_position: int) -> None:
        self.spec = spec
        self.layers = spec.layers
        self.num_ids = spec.draft_vocab_size
        self._kernels = target.kernels
        self._dtype = target.dtype
        hidden, make = spec.hidden_size, LayerMaker(target, spec.norm_eps)
        self.fc = make.linear("fc", {"fc": hidden}, len(spec.layers) * hidden)
        self.layer = HeadLayer(_LAYER, spec, 2 * hidden, make, max_position)
        self.lm_head = make.linear("lm_head", {"lm_head": spec.draft_vocab_size}, hidden)
        self.d2t = torch.zeros(spec.draft_vocab_size, dtype=torch.int64, device=target.device)
        """What a draft's id and its target's differ by."""
        self.embed_norm = make.norm(f"{_LAYER}.input_layernorm", hidden)
        self.hidden_norm = make.norm(f"{_LAYER}.hidden_norm", hidden)
        self.norm = make.norm("norm", hidden)

    @property
    def offsets(self) -> Tensor:
        """See Head."""
        return self.d2t

    def features(self, states: list[Tensor]) -> Tensor:
        """See Head."""
        return self.fc(self._kernels.concat(states).to(self._dtype))

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
        queries = self.layer.queries(self._input(embeds, features), positions, locations, kv)
        # What comes next adds to it in place.
        x, residual = self.layer.rest(queries, self._kernels.concat([features]), batch, kv)
        return self.norm.add(x, residual)

    def logits(self, states: Tensor) -> Tensor:
        """See Head."""
        return self.lm_head(states)

    def _input(self, embeds: Tensor, features: Tensor) -> Tensor:
        return self._kernels.concat([self.embed_norm(embeds.to(self._dtype)), self.hidden_norm(features)])

    def targets(self) -> dict[str, LoadTarget]:
        """What to load, by published names."""
        found = self.fc.targets("") | self.layer.targets() | self.lm_head.targets("")
        for norm in (self.embed_norm, self.hidden_norm, self.norm):
            found |= norm.targets()
        return found | {"d2t": LoadTarget(tuple(self.d2t.shape), self._load_d2t)}

    def _load_d2t(self, tensor: Tensor | PackedRows) -> None:
        assert isinstance(tensor, Tensor)
        self.d2t.copy_(tensor)
