"""Trees of drafts out of what was there before, in Triton; see kernels/ngram.py. One program a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.cuda.speculative import match_lengths
from kernels.ngram import MULTIPLIER, NgramCorpus, NgramSearch, TreeShape
from kernels.speculative import Drafts

TEXT_BLOCK = 1024
"""Places of a text that a program looks at at a time."""
_MULTIPLIER = tl.constexpr(MULTIPLIER)


def ngram_tree(
    texts: Tensor,
    seq_len: Tensor,
    rows: Tensor,
    num_drafts: int,
    search: NgramSearch,
    longest: int,
    corpus: NgramCorpus | None,
) -> Drafts:
    """`kernels.ngram.ngram_tree`, in one launch; `longest` does not matter, each text is as long as it is."""
    shape = TreeShape.of(num_drafts, search.branches)
    tokens = torch.empty(len(rows), num_drafts, dtype=torch.int64, device=rows.device)
    parents = torch.empty_like(tokens) if shape.branches > 1 else None
    drafts = Drafts(tokens, parents)
    if len(rows) == 0 or num_drafts == 0:
        return drafts
    assert texts.stride(1) == 1 and rows.is_contiguous(), "must be dense"
    num_known, num_keys, kept = 0, 0, 1
    if corpus is not None:
        assert all(part.is_contiguous() for part in (corpus.tokens, corpus.keys, corpus.places)), "must be dense"
        num_known, num_keys, kept = len(corpus.tokens), len(corpus.keys), corpus.places.shape[1]
    kept_size = triton.next_power_of_2(kept)
    kernel: Any = tree_rows[(len(rows),)]
    kernel(
        texts,
        seq_len,
        rows,
        None if corpus is None else corpus.tokens,
        None if corpus is None else corpus.keys,
        None if corpus is None else corpus.places,
        tokens,
        parents,
        num_drafts,
        shape.depth,
        shape.share,
        search.least,
        texts.shape[1] - 2,
        texts.stride(0),
        num_known,
        num_keys,
        kept,
        MOST=search.most,
        BRANCHES=shape.branches,
        BLOCK=TEXT_BLOCK,
        SIZE=triton.next_power_of_2(num_drafts),
        WAYS=triton.next_power_of_2(shape.branches),
        KEPT=kept_size,
        KNOWN=triton.next_power_of_2(search.most - search.least + 1) * kept_size,
        num_warps=4,
    )
    return drafts


@triton.jit
def _after(text, known, last, num_known, at, step, mask):
    """The token `step` behind the one after `at`: a place of the text, or below 0 the corpus' place -1 - at. -1 where
    mask is not, and behind the corpus' end."""
    token = tl.load(text + at + 1 + step % tl.maximum(last - at, 1), mask=mask & (at >= 0), other=-1)
    if known is not None:
        place = step - at
        there = tl.load(known + place, mask=mask & (at < 0) & (place < num_known), other=-1)
        token = tl.where(at < 0, there, token)
    return token


@triton.jit
def _in_corpus(
    text,
    last,
    keys,
    known_places,
    least,
    num_keys,
    kept,
    MOST: tl.constexpr,
    KEPT: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """For each length and rank: a place of the corpus as in _after, and its score, -1 for none."""
    index = tl.arange(0, KNOWN)
    length = least + index // KEPT
    rank = index % KEPT
    key = tl.full([KNOWN], 1, tl.int64)
    for back in tl.static_range(MOST):
        token = tl.load(text + last - back, mask=last >= back, other=0).to(tl.int64)
        key = tl.where(back < length, key * _MULTIPLIER + token + 1, key)
    # How many keys are smaller.
    smaller = tl.zeros([KNOWN], tl.int64)
    stride = num_keys.to(tl.int64)
    while stride > 0:
        probe = smaller + stride
        is_smaller = tl.load(keys + probe - 1, mask=probe <= num_keys, other=0) < key
        smaller = tl.where((probe <= num_keys) & is_smaller, probe, smaller)
        # Halves, rounded up, until one was tried.
        stride = tl.where(stride > 1, (stride + 1) // 2, 0)
    mask = (smaller < num_keys) & (length <= MOST) & (last >= length - 1) & (rank < kept)
    mask = mask & (tl.load(keys + smaller, mask=mask, other=0) == key)
    place = tl.load(known_places + smaller * kept + rank, mask=mask, other=-1)
    score = tl.where(place >= 0, (2 * length.to(tl.int64) << 32) + (kept - rank), -1)
    return -1 - place, score


@triton.jit(
    do_not_specialize=["num_drafts", "depth", "share", "least", "last_place", "text_stride", "num_known", "num_keys"]
)
def tree_rows(
    texts,
    seq_len,
    rows,
    known,
    keys,
    known_places,
    tokens_out,
    parents_out,
    num_drafts,
    depth,
    share,
    least,
    last_place,
    text_stride,
    num_known,
    num_keys,
    kept,
    MOST: tl.constexpr,
    BRANCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    WAYS: tl.constexpr,
    KEPT: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """The best matches of a text's end that go on differently, and the tree of what follows them. SIZE, WAYS, KEPT,
    KNOWN: powers of two, at least num_drafts, BRANCHES, kept, and KEPT for each length of a match."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows + row)
    text = texts + slot * text_stride
    last = tl.minimum(tl.load(seq_len + slot), last_place).to(tl.int32)
    way = tl.arange(0, WAYS)
    # Where the continuations begin, as in _after, best first.
    places = tl.zeros([WAYS], tl.int32)
    num_found = 0
    if known is not None:
        known_at, known_score = _in_corpus(
            text, last, keys, known_places, least, num_keys, kept, MOST=MOST, KEPT=KEPT, KNOWN=KNOWN
        )
    for branch in range(BRANCHES):
        best = tl.full([BLOCK], -1, tl.int64)
        for first in range(0, last, BLOCK):
            place = first + tl.arange(0, BLOCK)
            length = match_lengths(text, place, last, MOST=MOST, BLOCK=BLOCK)
            counts = (length >= least) & (place < last)
            for earlier in range(branch):
                at = tl.sum(tl.where(way == earlier, places, 0))
                same = counts
                for step in range(depth):
                    token = _after(text, known, last, num_known, at, step, True)
                    there = tl.load(text + place + 1 + step % tl.maximum(last - place, 1), mask=same, other=-2)
                    same = same & (there == token)
                counts = counts & (same == 0)
            score = ((2 * length.to(tl.int64) + 1) << 32) + place
            best = tl.maximum(best, tl.where(counts, score, -1))
        found = tl.max(best)
        at = (found & 0xFFFFFFFF).to(tl.int32)
        if known is not None:
            best_known = tl.max(known_score)
            chosen = tl.max(tl.where(known_score == best_known, known_at, -0x7FFFFFFF))
            at = tl.where(found >= best_known, at, chosen)
            found = tl.maximum(found, best_known)
            excluded = known_score >= 0
            for step in range(depth):
                token = _after(text, known, last, num_known, at, step, found >= 0)
                ahead = step - known_at
                follows = tl.load(known + ahead, mask=excluded & (ahead < num_known), other=-1)
                excluded = excluded & (follows == token)
            known_score = tl.where(excluded, -1, known_score)
        places = tl.where((way == branch) & (found >= 0), at, places)
        num_found += (found >= 0).to(tl.int32)
    step = tl.arange(0, SIZE)
    mask = (way < num_found)[:, None] & (step < num_drafts)[None, :]
    tokens = _after(text, known, last, num_known, places[:, None], step[None, :], mask)
    # How many there are of each, up to the first that is none.
    lens = tl.min(tl.where((tokens < 0) | (step >= num_drafts)[None, :], step[None, :], SIZE), axis=1)
    # Nodes of the others are counted from SIZE + 1 on until it is known how many are left for the best.
    starts = tl.zeros([WAYS], tl.int32)
    ends = lens
    parents = tl.zeros([WAYS], tl.int32)
    nodes = tl.broadcast_to(step[None, :] + 1, [WAYS, SIZE])
    others = 0
    for branch in range(1, BRANCHES):
        own = tl.sum(tl.where((way == branch)[:, None], tokens, 0), axis=0)
        same = tl.min(tl.where(tokens == own[None, :], SIZE, step[None, :]), axis=1)
        common = tl.where(way < branch, tl.minimum(same, ends), -1)
        start = tl.max(common)
        with_whom = tl.min(tl.where(common == start, way, WAYS))
        num = tl.sum(tl.where(way == branch, lens, 0)) - start
        num = tl.minimum(tl.maximum(num, 0), share)
        theirs = tl.sum(tl.where((way == with_whom)[:, None], nodes, 0), axis=0)
        parent = tl.sum(tl.where(step == start - 1, theirs, 0))
        line = tl.where(step < start, theirs, SIZE + 1 + others + step - start)
        nodes = tl.where((way == branch)[:, None], line[None, :], nodes)
        starts = tl.where(way == branch, start, starts)
        ends = tl.where(way == branch, start + num, ends)
        parents = tl.where(way == branch, parent, parents)
        others += num
    of_best = tl.minimum(num_drafts - others, tl.sum(tl.where(way == 0, lens, 0)))
    ends = tl.where(way == 0, of_best, ends)
    nodes = tl.where(nodes > SIZE, nodes - SIZE + of_best, nodes)
    parents = tl.where(parents > SIZE, parents - SIZE + of_best, parents)
    is_own = (step[None, :] >= starts[:, None]) & (step[None, :] < ends[:, None]) & (way < BRANCHES)[:, None]
    out = row * num_drafts + nodes - 1
    tl.store(tokens_out + out, tokens.to(tl.int64), mask=is_own)
    unused = (step >= of_best + others) & (step < num_drafts)
    tl.store(tokens_out + row * num_drafts + step, tl.full([SIZE], -1, tl.int64), mask=unused)
    if parents_out is not None:
        parent = tl.where(step[None, :] == starts[:, None], parents[:, None], nodes - 1)
        tl.store(parents_out + out, parent.to(tl.int64), mask=is_own)
        tl.store(parents_out + row * num_drafts + step, tl.zeros([SIZE], tl.int64), mask=unused)
