"""An EAGLE head: one decoder layer that goes on from the target's last hidden states.

Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", 2024, and with dynamic trees "EAGLE-2:
Faster Inference of Language Models with Dynamic Draft Trees", 2024. For the token at place j it computes from that
token's embedding and from what the target's output projection reads at place j - 1 what that would read at place j. It
has no embeddings and no output projection of its own, and only one norm, before its MLP: the target's last hidden
states are normed, and so are what it learnt to give.
"""

from __future__ import annotations

from torch import Tensor

from kernels.attention import AttentionBatch
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.head import HeadLayer, HeadSpec, LayerMaker


class EagleHead:
    """Weights and computation, see Head. Weights are loaded by who makes it."""

    def __init__(self, spec: HeadSpec, target: Decoder, max_position: int) -> None:
        self.spec = spec
        self.layers = (target.spec.num_layers + 1,)
        self.num_ids = target.spec.vocab_size
        self._target = target
        hidden, make = spec.hidden_size, LayerMaker(target, spec.norm_eps)
        self.fc = make.linear("fc", {"fc": hidden}, 2 * hidden, bias=True)
        """Its bias is of zeros for heads without."""
        self.layer = HeadLayer("layers.0", spec, hidden, make, max_position)

    @property
    def offsets(self) -> None:
        """See Head: its ids are the target's."""

    def features(self, states: list[Tensor]) -> Tensor:
        """See Head."""
        return self._target.kernels.concat(states)

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
        queries = self.layer.queries(x, positions, locations, kv)
        out, residual = self.layer.rest(queries, x, batch, kv)
        hidden = self._target.kernels.add_rows(out, residual)
        return hidden, hidden

    def logits(self, states: Tensor) -> Tensor:
        """See Head."""
        return self._target.logits(states)

    def _input(self, embeds: Tensor, features: Tensor) -> Tensor:
        return self.fc(self._target.kernels.concat([embeds, features]))

    def targets(self) -> dict[str, LoadTarget]:
        """What to load, by published names."""
        return self.fc.targets("") | self.layer.targets()
