"""Growing trees against a slow reference."""

from __future__ import annotations

import pytest
import torch

from scheduler_proc.speculative.dynamic_tree import GrowingTree


class Slow:
    """One row's tree, as lists: (score, token, parent candidate)."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.candidates: list[tuple[float, int, int]] = []
        self.frontier: list[int] = []
        self.extended: list[int] = []

    def add(self, parent: int, log_probs: list[float], ids: list[int]) -> list[int]:
        base = 0.0 if parent < 0 else self.candidates[parent][0]
        first = len(self.candidates)
        self.candidates += [(base + p, token, parent) for p, token in zip(log_probs, ids, strict=True)]
        return list(range(first, len(self.candidates)))


@pytest.mark.parametrize("seed", range(30))
def test_trees(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, width, steps, num = 3, 1 + seed % 4, 1 + seed % 5, 1 + seed % 7

    def likely(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.randn(*shape, 20, generator=generator).double().log_softmax(-1)
        found = logits.topk(width)
        return found.values.float(), found.indices

    log_probs, ids = likely(rows)
    grown = GrowingTree.begin(log_probs, ids)
    slow = [Slow(width) for _ in range(rows)]
    for row, one in enumerate(slow):
        one.frontier = one.add(-1, log_probs[row].tolist(), ids[row].tolist())
    for _ in range(steps - 1):
        tokens, parents = grown.extended()
        for row, one in enumerate(slow):
            nodes = one.extended + one.frontier
            assert tokens[row].tolist() == [one.candidates[node][1] for node in nodes]
            told = [one.candidates[node][2] for node in nodes]
            assert parents[row].tolist() == [0 if parent < 0 else nodes.index(parent) + 1 for parent in told]
        log_probs, ids = likely(rows, width)
        grown.grow(log_probs, ids)
        for row, one in enumerate(slow):
            fresh = [
                node
                for beam, parent in enumerate(one.frontier)
                for node in one.add(parent, log_probs[row, beam].tolist(), ids[row, beam].tolist())
            ]
            one.extended += one.frontier
            one.frontier = sorted(fresh, key=lambda node: -one.candidates[node][0])[:width]
    num = min(num, grown.tokens.shape[1])
    drafts = grown.best(num)
    assert drafts.parents is not None
    for row, one in enumerate(slow):
        kept = sorted(sorted(range(len(one.candidates)), key=lambda node: -one.candidates[node][0])[:num])
        assert drafts.tokens[row].tolist() == [one.candidates[node][1] for node in kept]
        told = [one.candidates[node][2] for node in kept]
        assert drafts.parents[row].tolist() == [0 if parent < 0 else kept.index(parent) + 1 for parent in told]
        assert all(parent <= node for node, parent in enumerate(drafts.parents[row].tolist()))
