"""Drafting with a model, token by token: chains, or the beams of a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.speculative import Drafts, tree_of
from scheduler_proc.speculative.dynamic_tree import GrowingTree
from scheduler_proc.speculative.room import Room


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
        self, predict: Predict, ids: Callable[[Tensor], Tensor], room: Room, last_token: Tensor, features: Tensor
    ) -> None:
        """ids: the target's, of the drafter's; last_token: int64 [n], of the rows; features: [n, size], what predict
        takes for those."""
        self._predict, self._ids, self._room = predict, ids, room
        self._token, self._features = last_token, features

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
        num_rows = len(self._token)
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
        room = self._room
        place = room.context + ahead
        usable, location = room.locations(place.unsqueeze(1))
        kv_lens = torch.where(usable.squeeze(1), place + 1, 1)
        batch = AttentionBatch(np.ones(len(place), np.int32), kv_lens, room.longest, room.table, room.page_size)
        position = torch.where(usable.squeeze(1), place, 0)
        return self._predict(token, features, position, batch, location.squeeze(1))

    def _pass(self, tokens: Tensor, parents: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """All nodes [n, m], node 0 first: logits [n, m, vocab], features [n, m, hidden]. parents: [n, m - 1]."""
        room = self._room
        num_rows, size = tokens.shape
        column = torch.arange(size, device=tokens.device)
        depths, visible = tree_of(Drafts(tokens[:, 1:], parents), column)
        assert visible is not None
        usable, locations = room.locations(room.context.unsqueeze(1) + column)
        positions = torch.where(usable, room.context.unsqueeze(1) + depths, 0)
        tree = TreeMask(visible.view(-1, size), depths.flatten().to(torch.int32))
        kv_lens = torch.where(room.active, room.context + size, size)
        q_lens = np.full(num_rows, size, np.int32)
        batch = AttentionBatch(q_lens, kv_lens, room.longest, room.table, room.page_size, tree=tree)
        flat = before.reshape(num_rows * size, before.shape[2])
        logits, features = self._predict(tokens.flatten(), flat, positions.flatten(), batch, locations.flatten())
        return logits.view(num_rows, size, -1), features.view(num_rows, size, before.shape[2])
