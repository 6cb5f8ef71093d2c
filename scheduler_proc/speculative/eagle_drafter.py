"""Drafts by an EAGLE head, which follows every pass of its target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.beams import Beams
from scheduler_proc.speculative.head import Head
from scheduler_proc.speculative.recorded import MakePass
from scheduler_proc.speculative.room import Room
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages


class EagleDrafter:
    """Chains of the most likely tokens, or dynamic trees.

    The head's keys and values lie in pages of their own pool, with the same ids as the target's. A place's depend on
    the features of the place before: the last ones of a slot are kept with it, and those of a page's last place with
    the page, for whoever goes on from there when the page is found in the prefix tree.
    """

    def __init__(
        self,
        head: Head,
        decoder: Decoder,
        slots: DeviceSlots,
        pages: Pages,
        kv: Tensor,
        num_pages: int,
        make_pass: MakePass,
        *,
        num_steps: int,
        top_k: int,
    ) -> None:
        """kv: the head's pages; num_pages: how many there are, the one that belongs to nobody included; make_pass: how
        the head is run; num_steps: how deep trees are; top_k: how many nodes are extended at each depth."""
        self._num_steps = num_steps
        self._top_k = top_k
        self._head = head
        self._decoder = decoder
        self._slots = slots
        self._pages = pages
        self.kv = (kv,)
        hidden, device, dtype = head.spec.hidden_size, decoder.device, decoder.dtype
        self._of_slots = torch.zeros(slots.num_slots + 1, hidden, dtype=dtype, device=device)
        """Features of the last place that has gone through the target."""
        self._of_pages = torch.zeros(num_pages, hidden, dtype=dtype, device=device)
        self._of_nodes: tuple[Tensor, Tensor] | None = None
        """Features [n, K + 1, hidden] and locations [n, K + 1] of the last pass, if it was of nodes."""
        self._expected: tuple[Tensor, Tensor | None, Tensor | None] | None = None
        self._next = make_pass(self._predicted, [hidden])
        self._store = make_pass(self._stored, [hidden])
        self._features = make_pass(self._features_of, [hidden] * len(head.layers))

    # -- drafter ------------------------------------------------------------------------------------------------------

    def join(self, joins: Joins) -> None:
        """See Drafter."""
        slots, contexts = self._slots.transfer.upload_all(
            (joins.slots, torch.int64), (joins.context_lens.astype(np.int64), torch.int64)
        )
        # What is found in the prefix tree are whole pages.
        column = (contexts // self._pages.page_size - 1).clamp(min=0)
        found = self._of_pages[self._slots.page_table[slots, column].long()]
        self._of_slots[slots] = torch.where((contexts > 0).unsqueeze(1), found, 0.0)

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        """See Drafter: the slots' last tokens are all that is needed."""

    def clear(self) -> None:
        """See Drafter."""
        self._of_slots.zero_()
        self._of_pages.zero_()

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        """See Drafter."""
        room = Room(self._slots, self._pages, rows, longest, limits)
        kernels, head = self._decoder.kernels, self._head
        beams = Beams(kernels, self._predict, head.logits, head.offsets, room, self._of_slots[rows])
        return beams.drafts(self._num_steps, min(self._top_k, self._head.num_ids), num_drafts)

    def _predict(
        self, tokens: Tensor, features: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        states, features = self._next(tokens, positions, batch, locations, [features])
        return states, features

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        """See Drafter."""
        assert self._of_nodes is not None, "no pass of nodes went before"
        self._keep(*self._of_nodes, rows, taken.way, taken.counts)

    # -- follower -----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """See Follower."""
        return self._head.layers

    def expect(self, rows: Tensor, q_starts: Tensor | None, parents: Tensor | None = None) -> None:
        """See Follower."""
        self._expected = rows, q_starts, parents

    def follow(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> None:
        """See Follower."""
        assert self._expected is not None, "nobody told of the rows of this pass"
        rows, q_starts, parents = self._expected
        (features,) = self._features(inputs, positions, batch, locations, states)
        num_rows = len(rows)
        if q_starts is None:
            size = len(features) // num_rows
            of_rows = features.view(num_rows, size, -1)
            before = self._decoder.kernels.features_before(self._of_slots, rows, of_rows, parents, size)
            self._of_nodes = of_rows, locations.view(num_rows, size)
            if size == 1:
                self._keep(*self._of_nodes, rows)
        else:
            before = self._before(features, rows, q_starts, locations)
        self._store(inputs, positions, batch, locations, [before])

    def _before(self, features: Tensor, rows: Tensor, q_starts: Tensor, locations: Tensor) -> Tensor:
        """The features of who comes before each token [num_tokens, hidden] of rows of any lengths, and the last ones
        are kept."""
        num_tokens, own, page_size = len(features), self._of_slots[rows], self._pages.page_size
        token = torch.arange(num_tokens, device=features.device)
        ends = q_starts[1:].long()
        row = torch.searchsorted(ends, token, right=True).clamp(max=len(rows) - 1)
        begins = token == q_starts[row]
        before = torch.where(begins.unsqueeze(1), own[row], features[(token - 1).clamp(min=0)])
        last = torch.where((ends > q_starts[:-1]).unsqueeze(1), features[(ends - 1).clamp(min=0)], own)
        at_end = locations % page_size == page_size - 1
        self._of_pages[torch.where(at_end, locations // page_size, self._pages.scratch)] = features
        self._of_slots[rows] = last
        return before

    def _keep(
        self,
        features: Tensor,
        locations: Tensor,
        rows: Tensor,
        way: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        page_size = self._pages.page_size
        self._decoder.kernels.keep_features(
            features, way, counts, rows, locations, page_size, self._of_slots, self._of_pages
        )

    # -- passes of the head, see Pass ---------------------------------------------------------------------------------

    def _predicted(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        (features,) = states
        return self._head.next(self._decoder.embed(inputs), features, positions, batch, locations, self.kv[0])

    def _stored(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        (before,) = states
        self._head.store(self._decoder.embed(inputs), before, positions, locations, self.kv[0])
        return ()

    def _features_of(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> Sequence[Tensor]:
        return (self._head.features(states),)
