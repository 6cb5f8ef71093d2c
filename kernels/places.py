"""Where drafts are computed before they are verified: the places behind rows' texts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.pages import pages_of
from kernels.speculative import VerifyLimits
from kernels.step import SlotTensors


@dataclass(frozen=True)
class Passes:
    """What goes through a drafter for each row, one pass after the other: chains, trees that grow, or a block.

    The first computes `size` tokens from the place of the text's last one on.
    """

    num: int
    size: int = 1
    growth: int = 0
    """0: a pass goes on at the place behind the one before it. Each of its tokens is a row of its own to attention, and
    sees all of the pass. Else each pass begins at the same place and has so many nodes more, all one deeper than the
    ones that came last; a row's nodes are one row to attention, and size is 1."""
    filler: int = 0
    """The tokens of the first pass behind each row's last one."""

    def first(self, number: int) -> int:
        """How far behind the text's last place a pass begins."""
        return 0 if self.growth else number * self.size

    def tokens(self, number: int) -> int:
        """Of a row in a pass."""
        return self.size + number * self.growth

    @property
    def most(self) -> int:
        """Places that all passes write to."""
        return self.first(self.num - 1) + self.tokens(self.num - 1)


@dataclass(frozen=True, eq=False)
class DraftPass:
    """What a pass of n rows reads; all dense."""

    positions: Tensor
    """int64 [n * tokens]: depth behind the text's last token; 0 at places that are not the row's to write to."""
    locations: Tensor
    """int64 [n * tokens]: `page * page_size + offset`; scratch_location for such places."""
    kv_lens: Tensor
    """int64 [n * size], of the rows of attention. Trees: the text and all nodes; of a row that does nothing, the nodes.
    Else: up to the pass's last place that is the row's; 1 if none is."""


@dataclass(frozen=True, eq=False)
class DraftPlaces:
    """What the passes of n rows read beside their tokens."""

    tokens: Tensor
    """int64 [n * size], of the first pass."""
    page_table: Tensor
    """int32 [n * size, num_columns], of the rows of attention; what lies behind the longest pass is arbitrary."""
    passes: tuple[DraftPass, ...]


def draft_places(
    rows: Tensor,
    passes: Passes,
    slots: SlotTensors,
    limits: VerifyLimits,
    page_size: int,
    scratch_location: int,
    num_columns: int,
) -> DraftPlaces:
    """The places behind the texts of the slots `rows` (int64 [n]), pass by pass.

    A row may write where its answer has room but for its last token, which needs no place, and nowhere once it has
    ended. num_columns: of the slots' page tables, as many as rows need at most.
    """
    size, growth = passes.size, passes.growth
    assert size == 1 or not growth, "trees begin with one node"
    context, end = slots.seq_len[rows].unsqueeze(1), limits.full_lens[rows].unsqueeze(1) - 1
    active = (context < end) & ~slots.ended[rows].unsqueeze(1)
    column = torch.arange(passes.most, device=rows.device)
    places = context + column
    usable = active & (places < end)
    pages = pages_of(slots.page_table, rows, places, page_size)
    locations = torch.where(usable, pages * page_size + places % page_size, scratch_location)
    depths = (column + (growth - 1)) // growth if growth else column
    positions = torch.where(usable, context + depths, 0)
    lengths = torch.where(active, context, 0) if growth else torch.where(usable, places + 1, 1)
    done = []
    for number in range(passes.num):
        first, num = passes.first(number), passes.tokens(number)
        within = slice(first, first + num)
        seen = lengths + num if growth else lengths[:, within].amax(dim=1, keepdim=True).expand(-1, size)
        parts = positions[:, within], locations[:, within], seen
        done.append(DraftPass(*(part.contiguous().view(-1) for part in parts)))
    tokens = torch.full((len(rows), size), passes.filler, dtype=torch.int64, device=rows.device)
    tokens[:, 0] = slots.last_token[rows]
    table = slots.page_table[rows, :num_columns].repeat_interleave(size, dim=0)
    return DraftPlaces(tokens.view(-1), table, tuple(done))
