"""Drafts by an EAGLE head, which follows every pass of its target."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.pages import pages_of
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.beams import Beams
from scheduler_proc.speculative.head import Head
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
        *,
        num_steps: int,
        top_k: int,
    ) -> None:
        """kv: the head's pages; num_pages: how many there are, the one that belongs to nobody included; num_steps: how
        deep trees are; top_k: how many nodes are extended at each depth."""
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
        self._of_nodes: Tensor | None = None
        """[n, K + 1, hidden]: of the last pass, if it was of nodes."""
        self._expected: tuple[Tensor, Tensor | None, Tensor | None] | None = None

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
        beams = Beams(self._predict, self._head.ids, room, self._slots.last_token[rows], self._of_slots[rows])
        return beams.drafts(self._num_steps, min(self._top_k, self._head.num_ids), num_drafts)

    def _predict(
        self, tokens: Tensor, features: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._head.next(self._decoder.embed(tokens), features, positions, batch, locations, self.kv[0])

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        """See Drafter."""
        of_nodes = self._of_nodes
        assert of_nodes is not None, "no pass of nodes went before"
        hidden, page_size = of_nodes.shape[2], self._pages.page_size
        way = taken.way.unsqueeze(2).expand(-1, -1, hidden)
        found = of_nodes.gather(1, way)
        counts = taken.counts.long()
        last = found.gather(1, (counts - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden)).squeeze(1)
        self._of_slots[rows] = torch.where((counts > 0).unsqueeze(1), last, self._of_slots[rows])
        step = torch.arange(found.shape[1], device=rows.device)
        places = nodes.context.unsqueeze(1) + step
        page = pages_of(self._slots.page_table, rows, places, page_size)
        ends = (step < counts.unsqueeze(1)) & (places % page_size == page_size - 1)
        self._of_pages[torch.where(ends, page, self._pages.scratch).flatten()] = found.view(-1, hidden)

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
        features = self._head.features(states)
        num_tokens, num_rows = len(features), len(rows)
        own = self._of_slots[rows]
        if q_starts is None:
            size = num_tokens // num_rows
            of_rows = features.view(num_rows, size, -1)
            if parents is None:
                before = torch.cat((own.unsqueeze(1), of_rows[:, :-1]), dim=1)
            else:
                index = parents.unsqueeze(2).expand(-1, -1, of_rows.shape[2])
                before = torch.cat((own.unsqueeze(1), of_rows.gather(1, index)), dim=1)
            before = before.view(num_tokens, -1)
            self._of_nodes = of_rows
            last = of_rows[:, -1]
        else:
            token = torch.arange(num_tokens, device=features.device)
            ends = q_starts[1:].long()
            row = torch.searchsorted(ends, token, right=True).clamp(max=num_rows - 1)
            begins = token == q_starts[row]
            before = torch.where(begins.unsqueeze(1), own[row], features[(token - 1).clamp(min=0)])
            last = torch.where((ends > q_starts[:-1]).unsqueeze(1), features[(ends - 1).clamp(min=0)], own)
        self._head.store(self._decoder.embed(inputs), before, positions, locations, self.kv[0])
        page_size = self._pages.page_size
        at_end = locations % page_size == page_size - 1
        self._of_pages[torch.where(at_end, locations // page_size, self._pages.scratch)] = features
        self._of_slots[rows] = last
