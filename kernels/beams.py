"""Dynamic trees of drafts: beams, of whose nodes the likeliest are kept, and the features that go from node to node.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024. All shapes are fixed by the
numbers of rows, beams, steps and kept nodes, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.speculative import Drafts


@dataclass(frozen=True, eq=False)
class Candidates:
    """All nodes that n trees have come by. First those after node 0, `width` of them, then step by step `width` after
    each of the `width` that were extended, in their order: whom a candidate comes after follows from its number."""

    width: int
    tokens: Tensor
    """int64 [n, C]"""
    scores: Tensor
    """float32 [n, C]: the logarithm of the product of probabilities on the way to each."""
    extended: Tensor
    """int64 [n, steps * width]: the candidates that were extended after each step, most likely first."""

    @classmethod
    def empty(cls, num_rows: int, width: int, steps: int, device: torch.device) -> Candidates:
        """With room for `steps` steps, nothing written."""
        num = width + (steps - 1) * width * width
        return cls(
            width,
            torch.empty(num_rows, num, dtype=torch.int64, device=device),
            torch.empty(num_rows, num, dtype=torch.float32, device=device),
            torch.empty(num_rows, steps * width, dtype=torch.int64, device=device),
        )

    def first(self, step: int) -> int:
        """The first candidate of a step."""
        return self.width + (step - 1) * self.width**2 if step else 0


@dataclass(frozen=True, eq=False)
class Frontier:
    """The nodes of n trees that go through the drafter next: node 0 and all that are extended, m of them."""

    tokens: Tensor
    """int64 [n, m]"""
    parents: Tensor
    """int64 [n, m - 1]: the node before each."""
    visible: Tensor
    """bool [n * m, m]: whether a node has another among its ancestors, or is it."""
    depths: Tensor
    """int32 [n * m]"""


def likeliest(logits: Tensor, width: int, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """The most likely tokens of each row, best first: their probabilities' logarithms float32 [m, width], and their ids
    int64 [m, width].

    logits: [m, vocab]; offsets: int64 [vocab], what ids differ by from columns; None: nothing.
    """
    found = logits.float().log_softmax(dim=-1).topk(width, dim=-1)
    ids = found.indices
    return found.values, ids if offsets is None else ids + offsets[ids]


def grow(
    log_probs: Tensor, ids: Tensor, candidates: Candidates, last: Tensor, before: Frontier | None, step: int
) -> Frontier:
    """What may come after the nodes extended last, and which of it is extended next.

    log_probs, ids: float32, int64 [n * beams, width], beams being 1 after node 0 and else width; last: int64 [n], the
    tokens of node 0; before: the frontier of the step before, None for the first; step: counted from 0. Of equals the
    first candidates are extended.
    """
    width, num_rows = candidates.width, len(last)
    first, num = candidates.first(step), width * (width if step else 1)
    scores = log_probs.view(num_rows, -1)
    if step:
        extended = candidates.extended[:, (step - 1) * width : step * width]
        scores = candidates.scores.gather(1, extended).repeat_interleave(width, dim=1) + scores
    candidates.scores[:, first : first + num] = scores
    candidates.tokens[:, first : first + num] = ids.view(num_rows, -1)
    chosen = scores.sort(dim=1, descending=True, stable=True).indices[:, :width]
    candidates.extended[:, step * width : (step + 1) * width] = first + chosen
    new_tokens = ids.view(num_rows, -1).gather(1, chosen)
    if before is None:
        tokens, parents = torch.cat((last.unsqueeze(1), new_tokens), dim=1), torch.zeros_like(chosen)
    else:
        tokens = torch.cat((before.tokens, new_tokens), dim=1)
        parents = torch.cat((before.parents, 1 + (step - 1) * width + chosen // width), dim=1)
    size = tokens.shape[1]
    visible = torch.zeros(num_rows, size, size, dtype=torch.bool, device=ids.device)
    old = size - width
    visible[:, :old, :old] = True if before is None else before.visible.view(num_rows, old, old)
    index = parents[:, -width:].unsqueeze(2).expand(-1, -1, size)
    visible[:, old:] = visible.gather(1, index)
    own = torch.arange(old, size, device=ids.device)
    visible[:, own, own] = True
    depths = (torch.arange(size, device=ids.device, dtype=torch.int32) + (width - 1)) // width
    return Frontier(tokens, parents, visible.view(-1, size), depths.repeat(num_rows))


def best(candidates: Candidates, num: int) -> Drafts:
    """The num most likely candidates, in their order: who comes before one is likelier, so is among them. Of equals the
    first are kept."""
    width, tokens = candidates.width, candidates.tokens
    kept = candidates.scores.sort(dim=1, descending=True, stable=True).indices[:, :num].sort(dim=1).values
    index = (kept - width).clamp(min=0)
    place = index // (width * width) * width + index % (width * width) // width
    parent = candidates.extended.gather(1, place)
    number = (kept.unsqueeze(1) == parent.unsqueeze(2)).byte().argmax(dim=2) + 1
    return Drafts(tokens.gather(1, kept), torch.where(kept < width, 0, number))


def features_before(own: Tensor, rows: Tensor | None, features: Tensor, parents: Tensor | None, size: int) -> Tensor:
    """The features of who comes before each of `size` nodes of n rows: [n * size, hidden].

    own: of who comes before node 0, [slots, hidden] for the slots `rows` (int64 [n]), or [n, hidden] for rows None;
    features: [n, k, hidden], of the rows' nodes, or of the first k of them; parents: int64 [n, size - 1], the node
    before each; None: the one before it.
    """
    first = own if rows is None else own[rows]
    if parents is None:
        rest = features[:, : size - 1]
    else:
        rest = features.gather(1, parents.unsqueeze(2).expand(-1, -1, features.shape[2]))
    return torch.cat((first.unsqueeze(1), rest), dim=1).flatten(0, 1)


def keep_features(
    features: Tensor,
    way: Tensor | None,
    counts: Tensor | None,
    rows: Tensor,
    locations: Tensor,
    page_size: int,
    of_slots: Tensor,
    of_pages: Tensor,
) -> None:
    """Keep the features of the last of each row's steps with its slot, and those of pages' last places with the pages.

    features: [n, k, hidden], of nodes; way: int64 [n, k], the node of each step (None: that of the same number);
    counts: int32 [n], how many steps count (None: all; a row of none keeps what it has); rows: int64 [n], slots;
    locations: int64 [n, k], where steps lie; of_slots: [slots, hidden]; of_pages: [pages, hidden], the last of which is
    nobody's.
    """
    num_rows, size, hidden = features.shape
    if way is not None:
        features = features.gather(1, way.unsqueeze(2).expand(-1, -1, hidden))
    taken = torch.full_like(rows, size) if counts is None else counts.long()
    last = features.gather(1, (taken - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, hidden)).squeeze(1)
    of_slots[rows] = torch.where((taken > 0).unsqueeze(1), last, of_slots[rows])
    is_taken = torch.arange(size, device=rows.device) < taken.unsqueeze(1)
    ends = is_taken & (locations % page_size == page_size - 1)
    page = torch.where(ends, locations // page_size, len(of_pages) - 1)
    of_pages[page.flatten()] = features.reshape(num_rows * size, hidden)
