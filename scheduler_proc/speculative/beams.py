"""Drafting with a model, token by token: chains, or the beams of a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.pages import pages_of
from kernels.speculative import Drafts, VerifyLimits, tree_of
from scheduler_proc.speculative.dynamic_tree import GrowingTree
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages

MOST_PLACES = 64 * 16
"""Behind a row's text, that any number of steps and beams writes to."""


class Predict(Protocol):
    """What a drafter's model says."""

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [num_tokens, vocab] after tokens (the target's ids, int64 [num_tokens]), and features [num_tokens,
        size] for who comes next; features: those of who came before; the rest is as for Decoder.forward."""
        ...


class Beams:
    """One round of drafts of some rows."""

    def __init__(
        self,
        predict: Predict,
        ids: Callable[[Tensor], Tensor],
        slots: DeviceSlots,
        pages: Pages,
        rows: Tensor,
        features: Tensor,
        longest: int,
        limits: VerifyLimits,
    ) -> None:
        """ids: the target's, of the drafter's; rows: int64 [n], slots; features: [n, size], what predict takes for
        their last tokens; longest: tokens of a row at most."""
        self._predict, self._ids = predict, ids
        self._rows, self._slots, self._pages = rows, slots, pages
        # Behind the text, too, are places that drafts are written to: as many as the table has room for.
        self._longest = longest = min(longest + MOST_PLACES, slots.page_table.shape[1] * pages.page_size)
        self._context = slots.seq_len[rows]
        # The last token of a full answer needs no place.
        self._end = limits.full_lens[rows] - 1
        self._active = (self._context < self._end) & ~slots.ended[rows]
        self._table = slots.page_table[rows, : -(-longest // pages.page_size)]
        self._token, self._features = slots.last_token[rows], features

    def drafts(self, num_steps: int, top_k: int, num_drafts: int) -> Drafts:
        """The num_drafts most likely nodes, num_steps deep at most, of top_k that are extended at each depth."""
        steps, width = min(num_steps, num_drafts), min(top_k, num_drafts)
        return self._chain(steps, num_drafts) if width == 1 else self._tree(steps, width, num_drafts)

    def _chain(self, steps: int, num_drafts: int) -> Drafts:
        """The most likely token after each; -1 beyond `steps`."""
        token, features = self._token, self._features
        drafted: list[Tensor] = []
        for ahead in range(steps):
            logits, features = self._next(token, features, ahead)
            best = logits.argmax(dim=-1)
            token = self._ids(best)
            drafted.append(token)
        none = [torch.full_like(token, -1)] * (num_drafts - steps)
        return Drafts(torch.stack((*drafted, *none), dim=1))

    def _tree(self, steps: int, width: int, num_drafts: int) -> Drafts:
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
        return found.values, self._ids(found.indices)

    def _next(self, token: Tensor, features: Tensor, ahead: int) -> tuple[Tensor, Tensor]:
        """One token of each row, `ahead` places behind its last one."""
        place = self._context + ahead
        usable, location = self._location(place.unsqueeze(1))
        kv_lens = torch.where(usable.squeeze(1), place + 1, 1)
        batch = AttentionBatch(
            np.ones(len(place), np.int32), kv_lens, self._longest, self._table, self._pages.page_size
        )
        position = torch.where(usable.squeeze(1), place, 0)
        return self._predict(token, features, position, batch, location.squeeze(1))

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
        flat = before.reshape(num_rows * size, before.shape[2])
        logits, features = self._predict(tokens.flatten(), flat, positions.flatten(), batch, locations.flatten())
        return logits.view(num_rows, size, -1), features.view(num_rows, size, before.shape[2])

    def _location(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the places [n, m] rows may write to, and where those are; others are nobody's."""
        page_size = self._pages.page_size
        usable = self._active.unsqueeze(1) & (places < self._end.unsqueeze(1))
        page = pages_of(self._slots.page_table, self._rows, places, page_size)
        return usable, torch.where(usable, page * page_size + places % page_size, self._pages.scratch_location)
