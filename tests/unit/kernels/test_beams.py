"""Growing trees against a slow reference."""

from __future__ import annotations

import pytest
import torch

from kernels import beams
from tests.unit.kernels.beam_cases import Growth


class Slow:
    """One row's tree, as lists: (score, token, parent candidate)."""

    def __init__(self) -> None:
        self.candidates: list[tuple[float, int, int]] = []
        self.frontier: list[int] = []
        self.extended: list[int] = []

    def add(self, parent: int, log_probs: list[float], ids: list[int]) -> list[int]:
        base = 0.0 if parent < 0 else self.candidates[parent][0]
        first = len(self.candidates)
        self.candidates += [(base + p, token, parent) for p, token in zip(log_probs, ids, strict=True)]
        return list(range(first, len(self.candidates)))

    def ancestors(self, node: int) -> set[int]:
        """Itself among them."""
        found = {node}
        while (node := self.candidates[node][2]) >= 0:
            found.add(node)
        return found


@pytest.mark.parametrize("seed", range(40))
def test_trees(seed: int) -> None:
    growth = Growth(seed, torch.device("cpu"))
    width = growth.width
    _, frontiers, drafts = growth.grown(beams)
    assert drafts.parents is not None
    for row in range(growth.num_rows):
        slow = Slow()
        for step, (log_probs, ids) in enumerate(growth.likely):
            beams_of = range(row * width, (row + 1) * width) if step else [row]
            fresh = [
                node
                for beam, parent in zip(beams_of, slow.frontier or [-1], strict=True)
                for node in slow.add(parent, log_probs[beam].tolist(), ids[beam].tolist())
            ]
            slow.frontier = sorted(fresh, key=lambda node: -slow.candidates[node][0])[:width]
            slow.extended += slow.frontier
            frontier, nodes = frontiers[step], slow.extended
            size = 1 + len(nodes)
            assert frontier.tokens[row].tolist() == [1000 + row, *(slow.candidates[node][1] for node in nodes)]
            told = [slow.candidates[node][2] for node in nodes]
            assert frontier.parents[row].tolist() == [0 if p < 0 else nodes.index(p) + 1 for p in told]
            depths = frontier.depths.view(-1, size)[row].tolist()
            assert depths == [0, *(len(slow.ancestors(node)) for node in nodes)]
            visible = frontier.visible.view(-1, size, size)[row]
            assert visible[0].tolist() == [True] + [False] * len(nodes)
            for place, node in enumerate(nodes, start=1):
                seen = slow.ancestors(node)
                assert visible[place].tolist() == [True, *(other in seen for other in nodes)]
        kept = sorted(sorted(range(len(slow.candidates)), key=lambda node: -slow.candidates[node][0])[: growth.num])
        assert drafts.tokens[row].tolist() == [slow.candidates[node][1] for node in kept]
        told = [slow.candidates[node][2] for node in kept]
        assert drafts.parents[row].tolist() == [0 if parent < 0 else kept.index(parent) + 1 for parent in told]
        assert all(parent <= node for node, parent in enumerate(drafts.parents[row].tolist()))


def test_what_is_likeliest() -> None:
    logits = torch.tensor([[0.0, 3.0, -1.0, 2.0], [5.0, 0.0, 4.0, 0.0]])
    log_probs, ids = beams.likeliest(logits, 2, torch.tensor([0, 10, 20, 30]))
    assert ids.tolist() == [[11, 33], [0, 22]]
    assert torch.allclose(log_probs.exp()[0, 0], logits[0].softmax(0)[1])
    assert beams.likeliest(logits, 1, None)[1].tolist() == [[1], [0]]


def test_features_of_who_comes_before() -> None:
    own, features = torch.tensor([[1.0], [2.0], [3.0]]), torch.arange(10.0, 16.0).view(2, 3, 1)
    rows, parents = torch.tensor([2, 0]), torch.tensor([[0, 0, 2], [0, 1, 1]])
    assert beams.features_before(own, rows, features, parents, 4).flatten().tolist() == [3, 10, 10, 12, 1, 13, 14, 14]
    assert beams.features_before(own[:2], None, features, None, 3).flatten().tolist() == [1, 10, 11, 2, 13, 14]


def test_features_that_are_kept() -> None:
    features = torch.arange(12.0).view(3, 4, 1)
    way = torch.tensor([[0, 2, 3, 0], [0, 1, 2, 3], [0, 0, 0, 0]])
    counts, rows = torch.tensor([3, 2, 0], dtype=torch.int32), torch.tensor([1, 4, 2])
    # Pages of two places: the second and the fourth step of the first row end one, the first of the second row.
    locations = torch.tensor([[2, 3, 6, 7], [5, 8, 9, 0], [0, 1, 2, 3]])
    of_slots, of_pages = torch.full((6, 1), -1.0), torch.full((10, 1), -1.0)
    beams.keep_features(features, way, counts, rows, locations, 2, of_slots, of_pages)
    assert of_slots.flatten().tolist() == [-1, 3, -1, -1, 5, -1]
    assert of_pages.flatten().tolist()[:9] == [-1, 2, 4, -1, -1, -1, -1, -1, -1]
    beams.keep_features(features[:1, :1], None, None, rows[:1], locations[:1, 1:2], 2, of_slots, of_pages)
    assert of_slots[1] == 0 and of_pages[1] == 0
