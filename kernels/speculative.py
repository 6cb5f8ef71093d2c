"""Verifying drafted tokens: the inputs of a step whose rows bring trees of them, what is accepted, and what follows.

A row's nodes are numbered: node 0 is its slot's last token, node i + 1 the i-th drafted one. Node j is computed at
place `seq_len + j` of the row, whatever its depth in the tree is; what is accepted moves to consecutive places.
All shapes are fixed by the number of rows and drafts, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import TreeMask
from kernels.pages import pages_of
from kernels.step import SlotTensors, StepInputs


@dataclass(frozen=True, eq=False)
class Drafts:
    """What may come next in each of n rows."""

    tokens: Tensor
    """int64 [n, K]: -1 where there is no such node."""
    parents: Tensor | None = None
    """int64 [n, K]: the node before each, which has a smaller number. None: each row's nodes are a chain."""


@dataclass(frozen=True, eq=False)
class VerifyLimits:
    """What bounds the drafts of slots."""

    full_lens: Tensor
    """int64 [num_slots + 1]: tokens of prompt and answer when the answer is full."""
    most_drafts: Tensor
    """int32 [num_slots + 1]: drafted tokens of a step at most."""


@dataclass(frozen=True, eq=False)
class Nodes:
    """The nodes of n rows, as they go through the model."""

    drafts: Drafts
    context: Tensor
    """int64 [n]: the slots' seq_len before the step."""
    usable: Tensor
    """bool [n, K + 1]: nodes that count. Node 0 is not usable where a slot has ended or its answer is full."""
    depths: Tensor
    """int32 [n, K + 1]"""
    kv_lens: Tensor
    """int64 [n, K + 1]: tokens of prompt and answer before the one that is drawn at each node."""
    visible: Tensor | None
    """bool [n, K + 1, K + 1]: whether a node has another among its ancestors, or is it. None for chains."""

    @property
    def tree(self) -> TreeMask | None:
        """For attention."""
        if self.visible is None:
            return None
        return TreeMask(self.visible.view(-1, self.visible.shape[2]), self.depths.view(-1))


@dataclass(frozen=True, eq=False)
class Taken:
    """What slots have taken of their drafts."""

    numbers: Tensor
    """int32 [n, K + 3]: tokens, counts and drafted side by side, as they go to the host."""
    way: Tensor
    """int64 [n, K + 1]: the node at which each token was drawn; arbitrary after the last."""

    @property
    def tokens(self) -> Tensor:
        """int32 [n, K + 1]: a row's new tokens, then zeros; -1 is a NaN, and the last of its row."""
        return self.numbers[:, :-2]

    @property
    def counts(self) -> Tensor:
        """int32 [n]: how many there are; 0 for a row that does nothing."""
        return self.numbers[:, -2]

    @property
    def drafted(self) -> Tensor:
        """int32 [n]: usable drafted nodes."""
        return self.numbers[:, -1]


def verify_inputs(
    rows: Tensor,
    drafts: Drafts,
    slots: SlotTensors,
    limits: VerifyLimits,
    page_size: int,
    scratch_location: int,
    out: StepInputs,
) -> Nodes:
    """Fill `out`, of n * (K + 1) tokens, for a step that verifies drafts of the slots `rows` (int64 [n]).

    Nodes that are not usable have token 0 at position 0. They are written to their places all the same, so that all the
    pass reads of a row was written. But those behind the page of a full answer's last place, and those of slots
    that have ended, go to scratch_location, and the row's page table names the row's first page there. Every row has a
    length of K + 1 at least. The slots stay as they are.
    """
    num_rows, num_drafts = drafts.tokens.shape
    size, device = num_drafts + 1, rows.device
    context = slots.seq_len[rows]
    # The last token of a full answer needs no place.
    end = limits.full_lens[rows] - 1
    active = (context < end) & ~slots.ended[rows]
    column = torch.arange(size, device=device)
    places = context.unsqueeze(1) + column
    usable = active.unsqueeze(1) & (places < end.unsqueeze(1)) & (column <= limits.most_drafts[rows].unsqueeze(1))
    usable[:, 1:] &= drafts.tokens >= 0
    depths, visible = tree_of(drafts, column)
    tokens = torch.cat((slots.last_token[rows].unsqueeze(1), drafts.tokens), dim=1).masked_fill(~usable, 0)
    pages = pages_of(slots.page_table, rows, places, page_size)
    last_column = ((end - 1).clamp(min=0) // page_size).unsqueeze(1)
    is_own = active.unsqueeze(1) & (places // page_size <= last_column)
    locations = (pages * page_size + places % page_size).masked_fill(~is_own, scratch_location)
    out.tokens.copy_(tokens.flatten())
    out.positions.copy_((context.unsqueeze(1) + depths).masked_fill(~usable, 0).flatten())
    out.locations.copy_(locations.flatten())
    out.kv_lens.copy_(torch.where(active, context + size, size))
    width = out.page_table.shape[1]
    torch.index_select(slots.page_table[:, :width], 0, rows, out=out.page_table)
    is_beyond = active.unsqueeze(1) & (torch.arange(width, device=device) > last_column)
    out.page_table.copy_(torch.where(is_beyond, out.page_table[:, :1], out.page_table))
    assert num_rows == len(rows)
    return Nodes(drafts, context, usable, depths.to(torch.int32), context.unsqueeze(1) + depths + 1, visible)


def tree_of(drafts: Drafts, column: Tensor) -> tuple[Tensor, Tensor | None]:
    """Depths int64 [n, K + 1], and for trees who sees whom, bool [n, K + 1, K + 1]. column: 0 to K."""
    num_rows, num_drafts = drafts.tokens.shape
    if drafts.parents is None:
        return column.expand(num_rows, -1), None
    size = num_drafts + 1
    depths = torch.zeros(num_rows, size, dtype=torch.int64, device=column.device)
    visible = torch.zeros(num_rows, size, size, dtype=torch.bool, device=column.device)
    visible[:, 0, 0] = True
    for node in range(1, size):
        parent = drafts.parents[:, node - 1 : node]
        depths[:, node] = depths.gather(1, parent).squeeze(1) + 1
        visible[:, node] = visible.gather(1, parent.unsqueeze(2).expand(-1, -1, size)).squeeze(1)
        visible[:, node, node] = True
    return depths, visible


def accept(nodes: Nodes, drawn: Tensor) -> tuple[Tensor, Tensor]:
    """Follow what the model has drawn through the drafted nodes.

    drawn: int32 [n, K + 1], the token that the model draws after each node. From node 0 on, the walk goes to the child
    that is the token drawn at its node (the first such), as long as there is one. Returns int64 [n, K + 1] the nodes on
    the way, beginning with node 0 (whatever comes after the last is arbitrary), and int64 [n] how many there are: so
    many tokens has the row, those drawn at the nodes of its way; 0 for a row that does nothing.

    As the draw at a node is the one that would be made without drafts (it depends on seed, position and logits alone),
    so are the tokens. A child is accepted with the probability that the model gives its token.
    """
    drafts, usable = nodes.drafts, nodes.usable
    num_rows, num_drafts = drafts.tokens.shape
    way = torch.zeros(num_rows, num_drafts + 1, dtype=torch.int64, device=drawn.device)
    if drafts.parents is None:
        hits = usable[:, 1:] & (drafts.tokens == drawn[:, :-1])
        counts = hits.long().cumprod(dim=1).sum(dim=1) + 1
        way += torch.arange(num_drafts + 1, device=drawn.device)
        return way, counts * usable[:, 0]
    at = way[:, :1]
    goes_on = usable[:, :1]
    counts = usable[:, :1].long()
    for depth in range(1, num_drafts + 1):
        token = drawn.gather(1, at)
        child = usable[:, 1:] & (drafts.parents == at) & (drafts.tokens == token) & goes_on
        goes_on = child.any(dim=1, keepdim=True)
        at = torch.where(goes_on, child.byte().argmax(dim=1, keepdim=True) + 1, at)
        way[:, depth : depth + 1] = at
        counts = counts + goes_on
    return way, counts.squeeze(1)


def take_accepted(rows: Tensor, nodes: Nodes, drawn: Tensor, slots: SlotTensors, limits: VerifyLimits) -> Taken:
    """Give the slots `rows` (int64 [n]) what `accept` finds in drawn (int32 [n, K + 1]).

    A row's tokens end with the first that is one of its stop_ids or -1 (a NaN, which counts as token 0 for its slot);
    its slot ends with it, and where the answer is full.
    """
    way, counts = accept(nodes, drawn)
    tokens = drawn.gather(1, way)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    valid = column < counts.unsqueeze(1)
    ends = (slots.stop_ids[rows].unsqueeze(1) == tokens.unsqueeze(2)).any(dim=2) & (tokens >= 0) | (tokens < 0)
    ends &= valid
    first_end = torch.where(ends.any(dim=1), ends.byte().argmax(dim=1) + 1, tokens.shape[1] + 1)
    counts = torch.minimum(counts, first_end)
    tokens = tokens.masked_fill(column >= counts.unsqueeze(1), 0)
    last = tokens.gather(1, (counts - 1).clamp(min=0).unsqueeze(1)).squeeze(1).long().clamp(min=0)
    moved = counts > 0
    length = nodes.context + counts
    scratch = rows == len(slots.seq_len) - 1
    slots.last_token[rows] = torch.where(moved, last, slots.last_token[rows])
    slots.seq_len[rows] = torch.where(scratch, 0, length)
    slots.ended[rows] = slots.ended[rows] | ends.any(dim=1) | (moved & (length >= limits.full_lens[rows] - 1))
    drafted = nodes.usable[:, 1:].sum(dim=1, dtype=torch.int32)
    return Taken(torch.cat((tokens, counts.to(torch.int32).unsqueeze(1), drafted.unsqueeze(1)), dim=1), way)


def append_tokens(texts: Tensor, seq_len: Tensor, rows: Tensor, tokens: Tensor, counts: Tensor | None) -> None:
    """Write the newest tokens of the slots `rows` (int64 [n]) into their texts.

    texts: int32 [num_slots + 1, width], where a slot's i-th token is at i; seq_len: int64 [num_slots + 1], the place of
    each slot's newest token; tokens: int32 [n, m], of which the first counts (int32 [n]; None: all) are valid. The last
    column of texts is nobody's.
    """
    num, nowhere = tokens.shape[1], texts.shape[1] - 1
    valid = torch.full_like(rows, num) if counts is None else counts.long()
    step = torch.arange(num, device=rows.device)
    places = (seq_len[rows] - valid + 1).unsqueeze(1) + step
    places = torch.where(step < valid.unsqueeze(1), places, nowhere).clamp(0, nowhere)
    texts[rows.unsqueeze(1), places] = tokens


def ngram_drafts(
    texts: Tensor, seq_len: Tensor, rows: Tensor, num_drafts: int, least: int, most: int, longest: int
) -> Tensor:
    """What came after the ends of texts when they were there before: int64 [n, num_drafts], -1 where they were not.

    texts, seq_len, rows: as for `append_tokens`; longest: places of these texts at most. Of the earlier places whose
    last tokens are the text's last ones, that with the longest match counts (of `least` tokens at least; more than
    `most` are not compared), of equals the latest. Where what follows it reaches the end of the text, that is repeated.
    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """
    width = min(longest, texts.shape[1] - 1)
    own, last = texts[rows, :width], seq_len[rows].clamp(max=width - 1).unsqueeze(1)
    place = torch.arange(width, device=texts.device)
    matches = place < last
    lengths = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(min(most, width)):
        token = own.gather(1, (last - back).clamp(min=0))
        same = torch.zeros_like(matches)
        same[:, back:] = own[:, : width - back] == token
        matches = matches & same & (last >= back)
        lengths += matches
    best, at = torch.where(lengths >= least, lengths * width + place, -1).max(dim=1, keepdim=True)
    found = best >= 0
    at = torch.where(found, at, 0)
    ahead = torch.arange(num_drafts, device=rows.device)
    tokens = own.gather(1, at + 1 + ahead % (last - at).clamp(min=1))
    return tokens.long().masked_fill(~found, -1)


def moves_of(
    rows: Tensor, nodes: Nodes, taken: Taken, page_table: Tensor, page_size: int, scratch_location: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `kernels.pages.compact_kv` must move of accepted nodes: sources, targets int64 [n, K], counts int64 [n].

    What does not move names scratch_location: who does nothing may own no page.
    """
    context, way = nodes.context.unsqueeze(1), taken.way
    steps = torch.arange(1, way.shape[1], device=way.device)

    counts = (taken.counts.long() - 1).clamp(min=0)

    def locations(places: Tensor) -> Tensor:
        found = pages_of(page_table, rows, places, page_size) * page_size + places % page_size
        return found.masked_fill(steps > counts.unsqueeze(1), scratch_location)

    return locations(context + way[:, 1:]), locations(context + steps), counts
