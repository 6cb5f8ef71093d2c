"""Trees of drafts against a slow reference that follows one row at a time."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.speculative import Drafts, Nodes, VerifyLimits, moves_of, take_accepted, verify_inputs
from kernels.step import SlotTensors, empty_inputs

SLOTS, PAGES, PAGE_SIZE = 5, 6, 4
SCRATCH = 999


class Case:
    """Random slots, and drafts for some of them; few tokens, so that much is accepted."""

    def __init__(self, seed: int, as_tree: bool) -> None:
        rng = self.rng = random.Random(seed)
        pages = rng.sample(range((SLOTS + 1) * PAGES), (SLOTS + 1) * PAGES)
        stops = [[rng.choice([-1, 2, 7]), -1] for _ in range(SLOTS + 1)]
        self.slots = SlotTensors(
            seq_len=torch.tensor([rng.randint(0, 12) for _ in range(SLOTS)] + [0]),
            last_token=torch.tensor([rng.randint(0, 3) for _ in range(SLOTS + 1)]),
            ended=torch.tensor([rng.random() < 0.2 for _ in range(SLOTS)] + [True]),
            stop_ids=torch.tensor(stops, dtype=torch.int32),
            page_table=torch.tensor(pages, dtype=torch.int32).view(SLOTS + 1, PAGES),
        )
        self.limits = VerifyLimits(
            full_lens=self.slots.seq_len + torch.tensor([rng.randint(1, 9) for _ in range(SLOTS + 1)]),
            most_drafts=torch.tensor([rng.choice([0, 2, 9]) for _ in range(SLOTS + 1)], dtype=torch.int32),
        )
        self.rows = torch.tensor(rng.sample(range(SLOTS), rng.randint(1, SLOTS)))
        n, k = len(self.rows), rng.randint(0, 6)
        tokens = torch.tensor([[rng.choice([-1, 0, 1, 2, 3]) for _ in range(k)] for _ in range(n)]).view(n, k)
        parents = torch.tensor([[rng.randint(0, i) for i in range(k)] for _ in range(n)]).view(n, k)
        self.drafts = Drafts(tokens, parents if as_tree else None)
        self.drawn = torch.tensor(
            [[rng.choice([0, 1, 2, 3, 3, -1 if rng.random() < 0.1 else 0]) for _ in range(k + 1)] for _ in range(n)],
            dtype=torch.int32,
        ).view(n, k + 1)
        self.inputs = empty_inputs(n * (k + 1), n, PAGES, self.rows.device)

    def on(self, device: torch.device) -> Case:
        """The same on a device."""
        for owner in (self.slots, self.limits, self.inputs, self.drafts):
            for name, value in vars(owner).items():
                object.__setattr__(owner, name, None if value is None else value.to(device))
        self.rows, self.drawn = self.rows.to(device), self.drawn.to(device)
        return self

    def verify(self) -> Nodes:
        return verify_inputs(self.rows, self.drafts, self.slots, self.limits, PAGE_SIZE, SCRATCH, self.inputs)

    def parent(self, row: int, node: int) -> int:
        parents = self.drafts.parents
        return node - 1 if parents is None else int(parents[row, node - 1])


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_nodes(seed: int, as_tree: bool) -> None:
    case = Case(seed, as_tree)
    nodes = case.verify()
    n, size = nodes.usable.shape
    for row, slot in enumerate(case.rows.tolist()):
        length, end = int(case.slots.seq_len[slot]), int(case.limits.full_lens[slot]) - 1
        active = length < end and not bool(case.slots.ended[slot])
        assert int(case.inputs.kv_lens[row]) == (length + size if active else size)
        pages = case.slots.page_table[slot].tolist()
        if active:
            own = (end - 1) // PAGE_SIZE + 1
            pages[own:] = pages[:1] * len(pages[own:])
        assert case.inputs.page_table[row].tolist() == pages
        for node in range(size):
            way = [node]
            while way[-1]:
                way.append(case.parent(row, way[-1]))
            token = int(case.slots.last_token[slot]) if node == 0 else int(case.drafts.tokens[row, node - 1])
            usable = active and length + node < end and node <= int(case.limits.most_drafts[slot]) and token >= 0
            at = row * size + node
            place = length + node
            assert bool(nodes.usable[row, node]) == usable
            assert int(nodes.depths[row, node]) == len(way) - 1
            assert int(nodes.kv_lens[row, node]) == length + len(way)
            expected = (token, length + len(way) - 1) if usable else (0, 0)
            assert (int(case.inputs.tokens[at]), int(case.inputs.positions[at])) == expected
            if active and place // PAGE_SIZE <= (end - 1) // PAGE_SIZE:
                page = int(case.slots.page_table[slot, place // PAGE_SIZE])
                assert int(case.inputs.locations[at]) == page * PAGE_SIZE + place % PAGE_SIZE
            else:
                assert int(case.inputs.locations[at]) == SCRATCH
            if nodes.visible is not None:
                assert nodes.visible[row, node].nonzero().flatten().tolist() == sorted(way)
    assert (nodes.tree is None) == (not as_tree)
    assert n == len(case.rows)


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize("seed", range(120))
def test_what_is_accepted(seed: int, as_tree: bool) -> None:
    case = Case(seed, as_tree)
    before = {name: getattr(case.slots, name).clone() for name in ("seq_len", "last_token", "ended")}
    nodes = case.verify()
    took = take_accepted(case.rows, nodes, case.drawn, case.slots, case.limits)
    tokens, taken = took.tokens, took.counts
    sources, targets, moved = moves_of(case.rows, nodes, took, case.slots.page_table, PAGE_SIZE, SCRATCH)
    assert torch.equal(took.drafted, nodes.usable[:, 1:].sum(1))
    size = nodes.usable.shape[1]
    for row, slot in enumerate(case.rows.tolist()):
        expected, path = [], [0]
        while bool(nodes.usable[row, 0]):
            token = int(case.drawn[row, path[-1]])
            expected.append(token)
            if token < 0 or token in case.slots.stop_ids[slot].tolist():
                break
            children = [
                node
                for node in range(1, size)
                if case.parent(row, node) == path[-1]
                and bool(nodes.usable[row, node])
                and int(case.drafts.tokens[row, node - 1]) == token
            ]
            if not children:
                break
            path.append(children[0])
        assert tokens[row, : int(taken[row])].tolist() == expected
        assert not tokens[row, int(taken[row]) :].any()
        length = int(before["seq_len"][slot])
        assert int(case.slots.seq_len[slot]) == length + len(expected)
        assert length + len(expected) <= int(case.limits.full_lens[slot]) - 1 or not expected
        if expected:
            ends = expected[-1] < 0 or expected[-1] in case.slots.stop_ids[slot].tolist()
            full = length + len(expected) == int(case.limits.full_lens[slot]) - 1
            assert bool(case.slots.ended[slot]) == (ends or full)
            assert int(case.slots.last_token[slot]) == max(expected[-1], 0)
        else:
            assert bool(case.slots.ended[slot]) == bool(before["ended"][slot])
            assert int(case.slots.last_token[slot]) == int(before["last_token"][slot])
        assert int(moved[row]) == max(len(expected) - 1, 0)
        still = slice(int(moved[row]), None)
        assert {*sources[row, still].tolist(), *targets[row, still].tolist()} <= {SCRATCH}
        for index in range(int(moved[row])):
            for location, place in ((sources, length + path[index + 1]), (targets, length + index + 1)):
                page = int(case.slots.page_table[slot, place // PAGE_SIZE])
                assert int(location[row, index]) == page * PAGE_SIZE + place % PAGE_SIZE


def test_the_scratch_slot_stays_as_it_is() -> None:
    case = Case(1, False)
    scratch = torch.tensor([SLOTS, SLOTS])
    drafts = Drafts(torch.ones(2, 3, dtype=torch.int64))
    nodes = verify_inputs(
        scratch, drafts, case.slots, case.limits, PAGE_SIZE, SCRATCH, empty_inputs(8, 2, PAGES, scratch.device)
    )
    drawn = torch.ones(2, 4, dtype=torch.int32)
    taken = take_accepted(scratch, nodes, drawn, case.slots, case.limits)
    assert taken.counts.tolist() == [0, 0] and not taken.tokens.any()
    assert int(case.slots.seq_len[SLOTS]) == 0 and bool(case.slots.ended[SLOTS])
