"""Drafting with a model, token by token: chains, or the beams of a dynamic tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, TreeMask
from kernels.beams import Candidates
from kernels.dispatch import KernelSet
from kernels.places import Passes
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
        features: Tensor,
    ) -> None:
        """logits: [num_tokens, vocab] of what predict gives; offsets: int64 [vocab], what the target's ids differ by
        from the drafter's, None: nothing; features: [n, size], what predict takes for the rows' last tokens."""
        self._kernels, self._predict, self._logits, self._offsets = kernels, predict, logits, offsets
        self._room, self._features = room, features

    def drafts(self, num_steps: int, top_k: int, num_drafts: int) -> Drafts:
        """The num_drafts most likely nodes, num_steps deep at most, of top_k that are extended at each depth."""
        steps, width = min(num_steps, num_drafts), min(top_k, num_drafts)
        return self._chain(steps, num_drafts) if width == 1 else self._tree(steps, width, num_drafts)

    def _chain(self, steps: int, num_drafts: int) -> Drafts:
        """The most likely token after each; -1 beyond `steps`."""
        room, features = self._room, self._features
        places = room.places(self._kernels, Passes(steps))
        token, q_lens = places.tokens, np.ones(len(room.rows), np.int32)
        drafted: list[Tensor] = []
        for at in places.passes:
            batch = AttentionBatch(q_lens, at.kv_lens, room.longest, places.page_table, room.page_size)
            states, features = self._predict(token, features, at.positions, batch, at.locations)
            token = self._kernels.likeliest(self._logits(states), 1, self._offsets)[1].squeeze(1)
            drafted.append(token)
        if steps < num_drafts:
            drafted += [torch.full_like(token, -1)] * (num_drafts - steps)
        return Drafts(torch.stack(drafted, dim=1))

    def _tree(self, steps: int, width: int, num_drafts: int) -> Drafts:
        """The most likely of all nodes that `steps` beams of `width` came by."""
        kernels, room, num_rows = self._kernels, self._room, len(self._room.rows)
        places = room.places(kernels, Passes(steps, growth=width))
        token = places.tokens
        candidates = Candidates.empty(num_rows, width, steps, token.device)
        before, frontier = self._features, None
        nodes = token.unsqueeze(1)
        for step, at in enumerate(places.passes):
            size = nodes.shape[1]
            q_lens = np.full(num_rows, size, np.int32)
            tree = None if frontier is None else TreeMask(frontier.visible, frontier.depths)
            batch = AttentionBatch(q_lens, at.kv_lens, room.longest, places.page_table, room.page_size, tree=tree)
            states, features = self._predict(nodes.flatten(), before, at.positions, batch, at.locations)
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
