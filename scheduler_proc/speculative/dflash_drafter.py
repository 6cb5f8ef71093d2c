"""Drafts by a DFlash drafter, which follows every pass of its target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.places import Passes
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.dflash import DFlashModel
from scheduler_proc.speculative.recorded import MakePass
from scheduler_proc.speculative.room import Room
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages


class DFlashDrafter:
    """A block behind each text in one pass.

    Keys and values lie in pages of their own pool, with the same ids as the target's. A place's follow from the
    target's hidden states there alone; a block's own are overwritten when the target has seen what was drafted.
    """

    def __init__(
        self,
        model: DFlashModel,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        kv: Sequence[Tensor],
        make_pass: MakePass,
    ) -> None:
        """kv: the drafter's pages, by layer; make_pass: how it is run."""
        self._model = model
        self._decoder = decoder
        self._slots = slots
        self._pages = pages
        self.kv = kv
        self._block = make_pass(self._block_states, ())
        self._store = make_pass(self._store_states, [decoder.spec.hidden_size] * len(model.spec.layers))

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
        room = Room(self._slots, self._pages, rows, longest, limits)
        num_rows, size = len(rows), num_drafts + 1
        # Whoever is in a block sees all of it, and the text: as tokens that follow each of them alone would.
        places = room.places(self._decoder.kernels, Passes(1, size, filler=self._model.spec.mask_id))
        (block,) = places.passes
        q_lens = np.ones(num_rows * size, np.int32)
        batch = AttentionBatch(q_lens, block.kv_lens, room.longest, places.page_table, room.page_size)
        (states,) = self._block(places.tokens, block.positions, batch, block.locations, [])
        masks = states.view(num_rows, size, -1)[:, 1:].flatten(0, 1).to(self._decoder.dtype)
        best = self._decoder.kernels.argmax_rows(self._decoder.logits(masks))
        return Drafts(best.view(num_rows, num_drafts).long())

    def _block_states(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        """See Pass."""
        return (self._model.block(self._decoder.embed(inputs), positions, batch, locations, self.kv),)

    # -- follower -----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """See Follower."""
        return self._model.spec.layers

    def expect(self, rows: Tensor, q_starts: Tensor | None, parents: Tensor | None = None) -> None:
        """See Follower: where tokens lie says all."""

    def follow(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> None:
        """See Follower."""
        self._store(inputs, positions, batch, locations, states)

    def _store_states(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        """See Pass."""
        self._model.store(states, positions, locations, self.kv)
        return ()
