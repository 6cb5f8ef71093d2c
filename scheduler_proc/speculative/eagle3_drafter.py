"""Drafts by an EAGLE-3 head, which follows every pass of its target."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits, tree_of
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.dynamic_tree import GrowingTree
from scheduler_proc.speculative.eagle3 import Eagle3Head
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages


class Eagle3Drafter:
    """Chains of the most likely tokens, or dynamic trees.

    The head's keys and values lie in pages of their own pool, with the same ids as the target's. A place's depend on
    the features of the place before: the last ones of a slot are kept with it, and those of a page's last place with
    the page, for whoever goes on from there when the page is found in the prefix tree.
    """

    def __init__(
        self,
        head: Eagle3Head,
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
        hidden, device = head.spec.hidden_size, decoder.device
        self._of_slots = torch.zeros(slots.num_slots + 1, hidden, dtype=head.fc.dtype, device=device)
        """Features of the last place that has gone through the target."""
        self._of_pages = torch.zeros(num_pages, hidden, dtype=head.fc.dtype, device=device)
        self._of_nodes: Tensor | None = None
        """[n, K + 1, hidden]: of the last pass, if it was of nodes."""
        self._expected: tuple[Tensor, Tensor | None, Tensor | None] | None = None

    @property
    def most_places(self) -> int:
        """Behind a row's text, that drafting writes to."""
        return places_of(self._num_steps, self._top_k)

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
        longest += self.most_places
        longest = min(longest, self._slots.page_table.shape[1] * self._pages.page_size)
        root = _Root(self, rows, longest, limits)
        steps = min(self._num_steps, num_drafts)
        width = min(self._top_k, num_drafts, self._head.spec.draft_vocab_size)
        if width == 1:
            return root.chain(steps, num_drafts)
        return root.tree(steps, width, num_drafts)

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
        columns = (places // page_size).clamp(max=self._slots.page_table.shape[1] - 1)
        page = self._slots.page_table[rows.unsqueeze(1), columns].long()
        ends = (step < counts.unsqueeze(1)) & (places % page_size == page_size - 1)
        self._of_pages[torch.where(ends, page, self._pages.scratch).flatten()] = found.view(-1, hidden)

    # -- follower -----------------------------------------------------------------------------------------------------

    @property
    def layers(self) -> tuple[int, ...]:
        """See Follower."""
        return self._head.spec.layers

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


def places_of(num_steps: int, top_k: int) -> int:
    """How many nodes drafting passes through a head: node 0, and all that are extended."""
    return 1 + (num_steps - 1) * top_k


class _Root:
    """One round of drafts of some rows."""

    def __init__(self, drafter: Eagle3Drafter, rows: Tensor, longest: int, limits: VerifyLimits) -> None:
        """longest: places of a row at most, those of drafts included."""
        slots, pages = drafter._slots, drafter._pages
        self._head, self._decoder, self._kv = drafter._head, drafter._decoder, drafter.kv[0]
        self._rows, self._slots, self._pages = rows, slots, pages
        self._longest = longest
        self._context = slots.seq_len[rows]
        # The last token of a full answer needs no place.
        self._end = limits.full_lens[rows] - 1
        self._active = (self._context < self._end) & ~slots.ended[rows]
        self._table = slots.page_table[rows, : -(-longest // pages.page_size)]
        self._token, self._features = slots.last_token[rows], drafter._of_slots[rows]

    def chain(self, steps: int, num_drafts: int) -> Drafts:
        """The most likely token after each; -1 beyond `steps`."""
        token, features = self._token, self._features
        drafted: list[Tensor] = []
        for ahead in range(steps):
            logits, features = self._next(token, features, ahead)
            best = logits.argmax(dim=-1)
            token = best + self._head.d2t[best]
            drafted.append(token)
        none = [torch.full_like(token, -1)] * (num_drafts - steps)
        return Drafts(torch.stack((*drafted, *none), dim=1))

    def tree(self, steps: int, width: int, num_drafts: int) -> Drafts:
        """The most likely of all nodes that `steps` beams of `width` came by."""
        num_rows = len(self._rows)
        logits, features = self._next(self._token, self._features, 0)
        grown = GrowingTree.begin(*self._likeliest(logits, width))
        # Of who comes before each node that goes through the head.
        before = torch.cat((self._features.unsqueeze(1), features.unsqueeze(1).expand(-1, width, -1)), dim=1)
        for _ in range(steps - 1):
            tokens, parents = grown.extended()
            logits, features = self._pass(torch.cat((self._token.unsqueeze(1), tokens), dim=1), parents, before)
            grown.grow(*self._likeliest(logits[:, -width:], width))
            # The next frontier's parents are nodes of this one.
            _, parents = grown.extended()
            index = parents[:, -width:].unsqueeze(2).expand(-1, -1, features.shape[2])
            before = torch.cat((before, features.gather(1, index)), dim=1)
        num = min(num_drafts, grown.tokens.shape[1])
        drafts = grown.best(num)
        if num == num_drafts:
            return drafts
        assert drafts.parents is not None
        more = drafts.tokens.new_full((num_rows, num_drafts - num), -1)
        return Drafts(torch.cat((drafts.tokens, more), 1), torch.cat((drafts.parents, torch.zeros_like(more)), 1))

    def _likeliest(self, logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Logarithms of probabilities, and the target's ids, of the most likely tokens."""
        found = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
        return found.values, found.indices + self._head.d2t[found.indices]

    def _next(self, token: Tensor, features: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """One token of each row, `ahead` places behind its last one."""
        place = self._context + ahead
        usable, location = self._location(place.unsqueeze(1))
        kv_lens = torch.where(usable.squeeze(1), place + 1, 1)
        batch = AttentionBatch(
            np.ones(len(place), np.int32), kv_lens, self._longest, self._table, self._pages.page_size
        )
        position = torch.where(usable.squeeze(1), place, 0)
        embeds = self._decoder.embed(token)
        return self._head.next(embeds, features, position, batch, location.squeeze(1), self._kv)

    def _pass(self, tokens: Tensor, parents: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """All nodes [n, m], node 0 first: logits [n, m, vocab], features [n, m, hidden]. parents: [n, m - 1]."""
        num_rows, size = tokens.shape
        column = torch.arange(size, device=tokens.device)
        depths, visible = tree_of(Drafts(tokens[:, 1:], parents), column)
        assert visible is not None
        usable, locations = self._location(self._context.unsqueeze(1) + column)
        positions = torch.where(usable, self._context.unsqueeze(1) + depths, 0)
        tree = TreeMask(visible.view(-1, size), depths.flatten().to(torch.int32))
        kv_lens = torch.where(self._active, self._context + size, size)
        batch = AttentionBatch(
            np.full(num_rows, size, np.int32), kv_lens, self._longest, self._table, self._pages.page_size, tree=tree
        )
        logits, features = self._head.next(
            self._decoder.embed(tokens.flatten()),
            before.reshape(num_rows * size, -1),
            positions.flatten(),
            batch,
            locations.flatten(),
            self._kv,
        )
        return logits.view(num_rows, size, -1), features.view(num_rows, size, -1)

    def _location(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the places [n, m] rows may write to, and where those are; others are nobody's."""
        page_size = self._pages.page_size
        usable = self._active.unsqueeze(1) & (places < self._end.unsqueeze(1))
        columns = (places // page_size).clamp(max=self._slots.page_table.shape[1] - 1)
        page = self._slots.page_table[self._rows.unsqueeze(1), columns].long()
        return usable, torch.where(usable, page * page_size + places % page_size, self._pages.scratch_location)
