"""Trees of n-gram drafts against a slow reference that looks at one row, and one place, at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.ngram import NgramCorpus, NgramSearch, TreeShape, ngram_tree
from kernels.speculative import Drafts, ngram_drafts
from scheduler_proc.speculative.corpus_index import index_corpus
from tests.unit.kernels.ngram_cases import NgramCase

SEEDS = [seed if seed < 60 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(1000)]


def expected_of(case: NgramCase, slot: int) -> list[list[int]]:
    """What is followed, best first: tokens that come after the text's end."""
    text = case.texts[slot].tolist()[: int(case.seq_len[slot]) + 1]
    found = [(length, 1, place, cycled(text, place, case.num_drafts)) for place, length in matches(case, text, text)]
    if case.corpus is not None:
        known = case.corpus.tokens.tolist()
        for length in range(case.search.least, min(case.search.most, len(text)) + 1):
            for rank, place in enumerate(known_places(known, text[-length:], case.search.branches)):
                found.append((length, 0, -rank, known[place + 1 :][: case.num_drafts]))
    shape = TreeShape.of(case.num_drafts, case.search.branches)
    kept: list[list[int]] = []
    for *_, tokens in sorted(found, reverse=True):
        if all(tokens[: shape.depth] != other[: shape.depth] for other in kept):
            kept.append(tokens)
    return kept[: shape.branches]


def matches(case: NgramCase, text: list[int], among: list[int]) -> list[tuple[int, int]]:
    found = []
    for place in range(len(among) - 1):
        length = 0
        while length < min(case.search.most, place + 1) and among[place - length] == text[-1 - length]:
            length += 1
        if length >= case.search.least:
            found.append((place, length))
    return found


def cycled(text: list[int], place: int, num: int) -> list[int]:
    tail = text[place + 1 :]
    return (tail * num)[:num]


def known_places(known: list[int], ngram: list[int], most: int) -> list[int]:
    """The last places before each next token, the most frequent first, of equals the latest."""
    ends: dict[int, list[int]] = {}
    for place in range(len(ngram) - 1, len(known) - 1):
        if known[place - len(ngram) + 1 : place + 1] == ngram:
            ends.setdefault(known[place + 1], []).append(place)
    return [places[-1] for places in sorted(ends.values(), key=lambda p: (len(p), p[-1]), reverse=True)][:most]


def paths(tokens: list[int], parents: list[int]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
        assert 0 <= parent < node
        if token >= 0:
            found[node] = (*found[parent], token)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_trees(seed: int) -> None:
    case = NgramCase(seed)
    drafts, shape = case.drafts(), TreeShape.of(case.num_drafts, case.search.branches)
    assert drafts.tokens.shape == (len(case.rows), case.num_drafts)
    for row, slot in enumerate(case.rows.tolist()):
        wanted, tokens = expected_of(case, slot), drafts.tokens[row].tolist()
        if shape.branches == 1:
            best = wanted[0] if wanted else []
            assert drafts.parents is None and tokens == best + [-1] * (case.num_drafts - len(best))
            continue
        assert drafts.parents is not None
        found = paths(tokens, drafts.parents[row].tolist())
        nodes = list(found.values())
        assert len(set(nodes)) == len(nodes), "no node is there twice"
        assert list(found) == list(range(len(found))), "unused ones are the last"
        best = wanted[0] if wanted else []
        of_best = 0
        while of_best < len(best) and of_best + 1 in found and found[of_best + 1] == tuple(best[: of_best + 1]):
            of_best += 1
        assert of_best >= min(shape.depth, len(best)), "the best one's come first"
        placed = {tuple(best[:depth]) for depth in range(len(best) + 1)}
        for number, other in enumerate(wanted[1:], start=2):
            ways = [tuple(other[:depth]) for depth in range(len(other) + 1)]
            start = max(depth for depth, way in enumerate(ways) if way in placed)
            placed.update(ways[: start + shape.share + 1])
            assert set(ways[: start + shape.share + 1]) <= set(nodes), f"the {number}th is followed"
        rest = len(placed) - len(best) - 1
        assert of_best == min(len(best), case.num_drafts - rest), "what is left is the best one's"
        assert len(nodes) == 1 + of_best + rest


@pytest.mark.parametrize("seed", range(30))
def test_one_branch_without_a_corpus_is_the_chain(seed: int) -> None:
    case = NgramCase(seed, branches=1, with_corpus=False)
    search = case.search
    chain = ngram_drafts(
        case.texts, case.seq_len, case.rows, case.num_drafts, search.least, search.most, case.texts.shape[1]
    )
    drafts = case.drafts()
    assert drafts.parents is None and torch.equal(drafts.tokens, chain)


def test_how_nodes_are_shared_out() -> None:
    for num_drafts in range(1, 65):
        for branches in range(1, 17):
            shape = TreeShape.of(num_drafts, branches)
            assert 1 <= shape.branches <= branches and shape.depth + (shape.branches - 1) * shape.share == num_drafts
            assert shape.branches == 1 or shape.depth >= 2 * shape.share
    assert TreeShape.of(7, 2) == TreeShape(2, 5, 2) and TreeShape.of(2, 4).branches == 1


def one_row(text: list[int], branches: int, corpus: list[int] | None = None, num_drafts: int = 6) -> Drafts:
    texts = torch.tensor([[*text, -1]], dtype=torch.int32)
    search = NgramSearch(1, 4, branches)
    known: NgramCorpus | None = None
    if corpus is not None:
        known = index_corpus(torch.tensor(corpus, dtype=torch.int32).numpy(), search, torch.device("cpu"))
    last: Tensor = torch.tensor([len(text) - 1])
    return ngram_tree(texts, last, torch.tensor([0]), num_drafts, search, len(text), known)


def test_what_continuations_have_in_common_is_there_once() -> None:
    # After 1 2 came 3 4 6 (the latest), and before 3 4 5.
    drafts = one_row([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2], 2)
    assert drafts.parents is not None
    assert drafts.tokens.tolist() == [[3, 4, 6, 1, 5, 1]] and drafts.parents.tolist() == [[0, 1, 2, 3, 2, 5]]


def test_a_text_goes_before_a_corpus_that_matches_as_much() -> None:
    corpus = [1, 2, 3, 8, 8, 8, 8, 8, 8]
    assert one_row([1, 2, 9, 4, 1, 2], 1, corpus).tokens.tolist() == [[9, 4, 1, 2, 9, 4]]
    # Here it matches more.
    assert one_row([2, 9, 4, 1, 2], 1, corpus).tokens.tolist() == [[3, 8, 8, 8, 8, 8]]
    # What is behind its end is nothing.
    assert one_row([5, 6, 7], 1, [6, 7, 3, 4]).tokens.tolist() == [[3, 4, -1, -1, -1, -1]]
    assert one_row([5, 6, 7], 2, [1, 2, 3, 4]).tokens.tolist() == [[-1] * 6]


def test_of_a_corpus_the_frequent_comes_first() -> None:
    drafts = one_row([7, 7, 1], 2, [1, 2, 0, 1, 2, 0, 1, 3, 0], 3)
    assert drafts.parents is not None
    assert drafts.tokens.tolist() == [[2, 0, 3]] and drafts.parents.tolist() == [[0, 1, 0]]
