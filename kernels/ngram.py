"""Trees of drafts out of what came after the last tokens before: in the text itself, and in a corpus.

All shapes are fixed by the number of rows and drafts, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.speculative import Drafts

MULTIPLIER = 0x5851F42D4C957F2D
"""Of hashes of n-grams: odd, and an int64."""


@dataclass(frozen=True, eq=False)
class NgramCorpus:
    """A text, and what came after each of its n-grams."""

    tokens: Tensor
    """int32 [num_tokens]"""
    keys: Tensor
    """int64 [num_ngrams], ascending: hashes of n-grams. That of no tokens is 1; each token, the newest first, makes
    `hash * MULTIPLIER + token + 1` of it."""
    places: Tensor
    """int32 [num_ngrams, branches]: where each ends, before different tokens, the most frequent first; -1 after the
    last."""


@dataclass(frozen=True)
class NgramSearch:
    """What counts as found."""

    least: int
    """Tokens of a match at least."""
    most: int
    """More are not compared."""
    branches: int
    """Different continuations that are followed at most."""


@dataclass(frozen=True)
class TreeShape:
    """How `num_drafts` nodes are shared out among continuations."""

    branches: int
    depth: int
    """Continuations that have so many tokens in common are one. It is what the others leave for the best."""
    share: int
    """Nodes of each of the others at most, behind those that it has in common with better ones."""

    @classmethod
    def of(cls, num_drafts: int, branches: int) -> TreeShape:
        """The best has twice as many as any other at least; where there are too few nodes, fewer are followed."""
        branches = max(min(branches, (num_drafts + 1) // 2), 1)
        share = max(num_drafts // (branches + 1), 1)
        return cls(branches, num_drafts - (branches - 1) * share, share)


def ngram_tree(
    texts: Tensor,
    seq_len: Tensor,
    rows: Tensor,
    num_drafts: int,
    search: NgramSearch,
    longest: int,
    corpus: NgramCorpus | None,
) -> Drafts:
    """What came after the ends of texts where they were before, `num_drafts` nodes for each of the rows; a chain where
    one continuation is followed.

    texts, seq_len, rows, longest: as for `kernels.speculative.ngram_drafts`, and places of a text match as there. Those
    of the corpus come behind those of a text that match as many tokens, the frequent ones first. Of all places the best
    is followed, then the best of those that go on differently, and so on (`TreeShape`). What they have in common is
    there once. The first nodes are the best one's, which also has those that the others leave.
    """
    shape = TreeShape.of(num_drafts, search.branches)
    found = _continuations(texts, seq_len, rows, num_drafts, search, shape, longest, corpus)
    if shape.branches == 1:
        return Drafts(found.squeeze(1))
    return _merged(found, shape)


def ngram_key(tokens: Tensor) -> Tensor:
    """Of n-grams, newest token first, [..., n]: int64 [...], as in `NgramCorpus.keys`."""
    key = torch.ones_like(tokens[..., 0], dtype=torch.int64)
    for index in range(tokens.shape[-1]):
        key = key * MULTIPLIER + tokens[..., index] + 1
    return key


def _continuations(
    texts: Tensor,
    seq_len: Tensor,
    rows: Tensor,
    num_drafts: int,
    search: NgramSearch,
    shape: TreeShape,
    longest: int,
    corpus: NgramCorpus | None,
) -> Tensor:
    """int64 [n, branches, num_drafts], best first, -1 where there is none or a corpus ends."""
    width = min(longest, texts.shape[1] - 1)
    own, last = texts[rows, :width], seq_len[rows].clamp(max=width - 1).unsqueeze(1)
    scores = _own_scores(own, last, search)
    places = torch.arange(width, device=rows.device).expand(len(rows), -1)
    known = texts.new_full((1,), -1) if corpus is None else corpus.tokens
    corpus_scores, corpus_places = _corpus_scores(own, last, search, corpus)
    scores = torch.cat((scores, corpus_scores), dim=1)

    def after(candidates: Tensor, step: Tensor | int) -> Tensor:
        """The token `step` behind those after own places [n, m]."""
        ahead = candidates + 1 + step % (last - candidates).clamp(min=1)
        return own.gather(1, ahead.clamp(max=width - 1))

    def after_known(candidates: Tensor, step: Tensor | int) -> Tensor:
        ahead = candidates + 1 + step
        return known[ahead.clamp(max=len(known) - 1)].masked_fill(ahead >= len(known), -1)

    steps = torch.arange(num_drafts, device=rows.device)
    found = []
    for _ in range(shape.branches):
        best, at = scores.max(dim=1, keepdim=True)
        tokens = after(at.clamp(max=width - 1), steps)
        if corpus is not None:
            known_at = corpus_places.gather(1, (at - width).clamp(min=0))
            tokens = torch.where(at < width, tokens, after_known(known_at, steps))
        tokens = tokens.masked_fill(best < 0, -1)
        found.append(tokens.long())
        same = torch.ones_like(scores, dtype=torch.bool)
        for step in range(shape.depth if len(found) < shape.branches else 0):
            there = torch.cat((after(places, step), after_known(corpus_places, step)), dim=1)
            same &= there == tokens[:, step : step + 1]
        scores = scores.masked_fill(same, -1)
    return torch.stack(found, dim=1)


def _own_scores(own: Tensor, last: Tensor, search: NgramSearch) -> Tensor:
    """Of a text's places, int64 [n, width]: by the length of the match, then the place; -1 for none."""
    width = own.shape[1]
    place = torch.arange(width, device=own.device)
    matches = place < last
    lengths = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(min(search.most, width)):
        token = own.gather(1, (last - back).clamp(min=0))
        same = torch.zeros_like(matches)
        same[:, back:] = own[:, : width - back] == token
        matches = matches & same & (last >= back)
        lengths += matches
    return torch.where(lengths >= search.least, ((2 * lengths + 1) << 32) + place, -1)


def _corpus_scores(own: Tensor, last: Tensor, search: NgramSearch, corpus: NgramCorpus | None) -> tuple[Tensor, Tensor]:
    """The same of the places that a corpus knows for the ends of texts, and those places, both int64 [n, m]."""
    if corpus is None:
        none = last[:, :0]
        return none, none
    tail = torch.stack([own.gather(1, (last - back).clamp(min=0)).squeeze(1) for back in range(search.most)], dim=1)
    lengths = torch.arange(search.least, search.most + 1, device=own.device)
    keys = torch.stack([ngram_key(tail[:, :length]) for length in range(search.least, search.most + 1)], dim=1)
    at = torch.searchsorted(corpus.keys, keys).clamp(max=len(corpus.keys) - 1)
    is_known = (corpus.keys[at] == keys) & (last >= lengths - 1)
    places = corpus.places[at].long().masked_fill(~is_known.unsqueeze(2), -1)
    rank = torch.arange(places.shape[2], device=own.device)
    scores = ((2 * lengths) << 32).unsqueeze(1) - rank + places.shape[2]
    return torch.where(places < 0, -1, scores).flatten(1), places.clamp(min=0).flatten(1)


def _merged(found: Tensor, shape: TreeShape) -> Drafts:
    """A tree of continuations int64 [n, branches, num_drafts] of which no two are the same."""
    num_rows, branches, num_drafts = found.shape
    device = found.device
    steps = torch.arange(num_drafts, device=device).expand(num_rows, -1)
    lens = (found >= 0).long().cumprod(dim=2).sum(dim=2)
    # Of each continuation: the step of the first node of its own, and that after its last; the nodes of all its steps,
    # where those of the others are counted from num_drafts + 1 on until it is known how many are left for the best.
    starts, ends, ways = torch.zeros_like(lens), lens.clone(), (steps + 1).unsqueeze(1).repeat(1, branches, 1)
    others = torch.zeros_like(lens[:, 0])
    for branch in range(1, branches):
        tokens = found[:, branch]
        same = (found[:, :branch] == tokens.unsqueeze(1)).long().cumprod(dim=2).sum(dim=2)
        start, with_whom = torch.minimum(same, ends[:, :branch]).max(dim=1)
        num = (lens[:, branch] - start).clamp(0, shape.share)
        common = ways.gather(1, with_whom.view(-1, 1, 1).expand(-1, -1, num_drafts)).squeeze(1)
        own = num_drafts + 1 + others.unsqueeze(1) + steps - start.unsqueeze(1)
        ways[:, branch] = torch.where(steps < start.unsqueeze(1), common, own)
        starts[:, branch], ends[:, branch] = start, start + num
        others += num
    of_best = torch.minimum(num_drafts - others, lens[:, 0])
    ends[:, 0] = of_best
    ways = torch.where(ways > num_drafts, ways - num_drafts + of_best.view(-1, 1, 1), ways)
    before = torch.cat((torch.zeros_like(ways[:, :, :1]), ways[:, :, :-1]), dim=2)
    is_own = (steps.unsqueeze(1) >= starts.unsqueeze(2)) & (steps.unsqueeze(1) < ends.unsqueeze(2))
    # What is nobody's own goes to a column behind the last.
    columns = torch.where(is_own, ways - 1, num_drafts).flatten(1)
    tokens = torch.full((num_rows, num_drafts + 1), -1, dtype=torch.int64, device=device)
    parents = torch.zeros_like(tokens)
    tokens.scatter_(1, columns, found.flatten(1))
    parents.scatter_(1, columns, before.flatten(1))
    return Drafts(tokens[:, :num_drafts].contiguous(), parents[:, :num_drafts].contiguous())
