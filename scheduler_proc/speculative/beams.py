"""Drafting with a model, token by token: chains, or the beams of a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.beams import Candidates, Frontier
from kernels.dispatch import KernelSet
from kernels.speculative import Drafts
from scheduler_proc.speculative.room import Room


class Predict(Protocol):
    """What a drafter's model says."""

    def __call__(
        self, tokens: Tensor, features: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What logits are made of [num_tokens, hidden] after tokens (the target's ids, int64 [num_tokens]), and
        features [num_tokens, size] for who comes next, valid until the next call; features: those of who came before;
        the rest is as for Decoder.forward, all of it dense."""
        ...


class Beams:
    """One round of drafts of some rows."""

    def __init__(
        self,
        kernels: KernelSet,
        predict: Predict,
        logits: Callable[[Tensor], Tensor],
        offsets: Tensor | None,
        room: Room,
        last_token: Tensor,
        features: Tensor,
    ) -> None:
        """logits: [num_tokens, vocab] of what predict gives; offsets: int64 [vocab], what the target's ids differ by
        from the drafter's, None: nothing; last_token: int64 [n], of the rows; features: [n, size], what predict takes
        for those."""
        self._kernels, self._predict, self._logits, self._offsets = kernels, predict, logits, offsets
        self._room = room
        self._token, self._features = last_token, features

    def drafts(self, num_steps: int, top_k: int, num_drafts: int) -> Drafts:
        """The num_drafts most likely nodes, num_steps deep at most, of top_k that are extended at each depth."""
        steps, width = min(num_steps, num_drafts), min(top_k, num_drafts)
        return self._chain(steps, num_drafts) if width == 1 else self._tree(steps, width, num_drafts)

    def _chain(self, steps: int, num_drafts: int) -> Drafts:
        """The most likely token after each; -1 beyond `steps`."""
        room, token, features = self._room, self._token, self._features
        ahead = torch.arange(steps, device=token.device)
        # One step after the other, rows side by side.
        places = (room.context + ahead.unsqueeze(1)).T
        usable, locations = (part.T.contiguous() for part in room.locations(places))
        kv_lens, positions = torch.where(usable, places.T + 1, 1), torch.where(usable, places.T, 0)
        q_lens = np.ones(len(token), np.int32)
        drafted: list[Tensor] = []
        for step in range(steps):
            batch = AttentionBatch(q_lens, kv_lens[step], room.longest, room.table, room.page_size)
            states, features = self._predict(token, features, positions[step], batch, locations[step])
            token = self._kernels.likeliest(self._logits(states), 1, self._offsets)[1].squeeze(1)
            drafted.append(token)
        none = [torch.full_like(token, -1)] * (num_drafts - steps)
        return Drafts(torch.stack((*drafted, *none), dim=1))

    def _tree(self, steps: int, width: int, num_drafts: int) -> Drafts:
        """The most likely of all nodes that `steps` beams of `width` came by."""
        kernels, token, num_rows = self._kernels, self._token, len(self._token)
        candidates = Candidates.empty(num_rows, width, steps, token.device)
        most_nodes = 1 + (steps - 1) * width
        column = torch.arange(most_nodes, device=token.device)
        usable, locations = self._room.locations(self._room.context.unsqueeze(1) + column)
        depths = (column + (width - 1)) // width
        positions = torch.where(usable, self._room.context.unsqueeze(1) + depths, 0)
        before, frontier = self._features, None
        nodes = token.unsqueeze(1)
        for step in range(steps):
            size = nodes.shape[1]
            # Of one column flatten would give a view that is not dense.
            at = tuple(part[:, :size].contiguous().flatten() for part in (positions, locations))
            states, features = self._pass(nodes, before, frontier, *at)
            # Those before were extended when they were the last.
            last = states.view(num_rows, size, -1)[:, -width:].flatten(0, 1)
            log_probs, ids = kernels.likeliest(self._logits(last), width, self._offsets)
            frontier = kernels.grow(log_probs, ids, candidates, token, frontier, step)
            nodes = frontier.tokens
            if step + 1 < steps:
                of_nodes = features.view(num_rows, size, -1)
                before = kernels.features_before(self._features, None, of_nodes, frontier.parents, nodes.shape[1])
        num = min(num_drafts, candidates.tokens.shape[1])
        drafts = kernels.best(candidates, num)
        if num == num_drafts:
            return drafts
        assert drafts.parents is not None
        more = drafts.tokens.new_full((num_rows, num_drafts - num), -1)
        return Drafts(torch.cat((drafts.tokens, more), 1), torch.cat((drafts.parents, torch.zeros_like(more)), 1))

    def _pass(
        self, nodes: Tensor, before: Tensor, frontier: Frontier | None, positions: Tensor, locations: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What logits are made of, and features, of all nodes int64 [n, m], node 0 first."""
        room, (num_rows, size) = self._room, nodes.shape
        kv_lens = torch.where(room.active, room.context + size, size)
        tree = None if frontier is None else TreeMask(frontier.visible, frontier.depths)
        q_lens = np.full(num_rows, size, np.int32)
        batch = AttentionBatch(q_lens, kv_lens, room.longest, room.table, room.page_size, tree=tree)
        return self._predict(nodes.flatten(), before, positions, batch, locations)
