"""Drafts by a smaller model of the same vocabulary, which follows every pass of its target."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.beams import Beams
from scheduler_proc.speculative.recorded import MakePass
from scheduler_proc.speculative.room import Room
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages


class StandaloneDrafter:
    """Its keys and values lie in pages of their own pool, with the same ids as the target's. What passes through the
    target passes through it, too: prompts, single tokens, and the nodes that are verified."""

    layers: tuple[int, ...] = ()

    def __init__(
        self,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        kv: list[Tensor],
        make_pass: MakePass,
        *,
        num_steps: int,
        top_k: int,
    ) -> None:
        """kv: the drafting model's pages, by layer; make_pass: how that is run; num_steps: how deep trees are; top_k:
        how many nodes are extended at each depth."""
        self._decoder = decoder
        self._slots = slots
        self._pages = pages
        self.kv = kv
        self._num_steps = num_steps
        self._top_k = min(top_k, decoder.spec.vocab_size)
        self._forward = make_pass(self._states, ())

    # -- drafter ------------------------------------------------------------------------------------------------------

    def join(self, joins: Joins) -> None:
        """See Drafter: all that is needed is in pages."""

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        """See Drafter: the slots' last tokens are all that is needed."""

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        """See Drafter."""

    def clear(self) -> None:
        """See Drafter."""

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        """See Drafter."""
        nothing = self._slots.sampling.temperature.new_zeros(len(rows), 0)
        room = Room(self._slots, self._pages, rows, longest, limits)
        beams = Beams(self._decoder.kernels, self._predict, self._decoder.logits, None, room, nothing)
        return beams.drafts(self._num_steps, self._top_k, num_drafts)

    def _predict(
        self, tokens: Tensor, features: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        (states,) = self._forward(tokens, positions, batch, locations, [])
        return states, features

    def _states(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        """See Pass."""
        return (self._decoder.forward(inputs, positions, batch, locations, list(self.kv)),)

    # -- follower -----------------------------------------------------------------------------------------------------

    def expect(self, rows: Tensor, q_starts: Tensor | None, parents: Tensor | None = None) -> None:
        """See Follower: where tokens lie says all."""

    def follow(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> None:
        """See Follower."""
        self._forward(inputs, positions, batch, locations, [])
