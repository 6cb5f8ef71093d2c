"""Verifying drafts in Triton, against kernels.speculative."""

from __future__ import annotations

import random

import pytest
import torch

from kernels import speculative as reference
from kernels.cuda import speculative
from kernels.step import empty_inputs
from tests.unit.kernels.slot_cases import copy_of
from tests.unit.kernels.test_speculative import PAGE_SIZE, PAGES, SCRATCH, Case


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_nodes_and_what_is_accepted(
    seed: int, as_tree: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if seed % 2:
        monkeypatch.setattr(speculative, "PAGE_BLOCK", 2)
    case, other = Case(seed, as_tree).on(device), Case(seed, as_tree).on(device)
    expected = case.verify()
    nodes = speculative.verify_inputs(
        other.rows, other.drafts, other.slots, other.limits, PAGE_SIZE, SCRATCH, other.inputs
    )
    for name in ("context", "usable", "depths", "kv_lens", "visible"):
        one, two = getattr(nodes, name), getattr(expected, name)
        assert (one is None) == (two is None) and (one is None or torch.equal(one, two)), name
        assert one is None or one.dtype == two.dtype
    for name in ("tokens", "positions", "locations", "kv_lens"):
        assert torch.equal(getattr(other.inputs, name), getattr(case.inputs, name)), name
    used = torch.arange(PAGES, device=device) * PAGE_SIZE < case.inputs.kv_lens.unsqueeze(1)
    assert torch.equal(other.inputs.page_table[used], case.inputs.page_table[used])
    wanted = reference.take_accepted(case.rows, expected, case.drawn, case.slots, case.limits)
    taken = speculative.take_accepted(other.rows, nodes, other.drawn, other.slots, other.limits)
    for name in ("tokens", "counts", "drafted"):
        assert torch.equal(getattr(taken, name), getattr(wanted, name)), name
    moves, wanted_moves = (
        ops.moves_of(case.rows, expected, wanted, case.slots.page_table, PAGE_SIZE, SCRATCH)
        for ops in (speculative, reference)
    )
    for one, two in zip(moves, wanted_moves, strict=True):
        assert torch.equal(one, two) and one.dtype == two.dtype
    valid = torch.arange(wanted.way.shape[1], device=device) < wanted.counts.unsqueeze(1)
    assert torch.equal(taken.way[valid], wanted.way[valid])
    for name in ("seq_len", "last_token", "ended"):
        assert torch.equal(getattr(other.slots, name), getattr(case.slots, name)), name


def test_rows_of_the_scratch_slot(device: torch.device) -> None:
    case = Case(3, False).on(device)
    scratch = len(case.slots.seq_len) - 1
    rows, before = torch.tensor([scratch, scratch], device=device), copy_of(case.slots)
    drafts = reference.Drafts(torch.ones(2, 3, dtype=torch.int64, device=device))
    inputs = empty_inputs(8, 2, PAGES, device)
    nodes = speculative.verify_inputs(rows, drafts, case.slots, case.limits, PAGE_SIZE, SCRATCH, inputs)
    drawn = torch.ones(2, 4, dtype=torch.int32, device=device)
    taken = speculative.take_accepted(rows, nodes, drawn, case.slots, case.limits)
    assert taken.counts.tolist() == [0, 0] and not nodes.usable.any()
    for name in ("seq_len", "last_token", "ended"):
        assert torch.equal(getattr(case.slots, name), getattr(before, name)), name


@pytest.mark.parametrize("block", [4, 1024])
@pytest.mark.parametrize("seed", range(16))
def test_texts(seed: int, block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "TEXT_BLOCK", block)
    rng = random.Random(seed)
    num_slots, width = 5, rng.randint(4, 40)
    texts = torch.tensor([[rng.randint(0, 2) for _ in range(width)] for _ in range(num_slots)], dtype=torch.int32)
    texts = texts.to(device)
    seq_len = torch.tensor([rng.randint(0, width - 2) for _ in range(num_slots)], device=device)
    rows = torch.tensor(rng.sample(range(num_slots), 3), device=device)
    num = rng.randint(1, 5)
    tokens = torch.tensor([[rng.randint(3, 9) for _ in range(num)] for _ in range(3)], dtype=torch.int32, device=device)
    counts = [min(rng.randint(0, num), int(length) + 1) for length in seq_len[rows].tolist()]
    valid = torch.tensor(counts, dtype=torch.int32, device=device)
    least = rng.randint(1, 3)
    wanted, found = (
        ops.ngram_drafts(texts, seq_len, rows, num, least, least + seed % 4, width) for ops in (reference, speculative)
    )
    assert torch.equal(found, wanted)
    one, two = texts.clone(), texts.clone()
    reference.append_tokens(one, seq_len, rows, tokens, valid)
    speculative.append_tokens(two, seq_len, rows, tokens, valid)
    assert torch.equal(one[:, :-1], two[:, :-1])
    one, two = texts.clone(), texts.clone()
    seq_len[rows] = seq_len[rows].clamp(min=min(num, width - 2))
    if num <= width - 1:
        reference.append_tokens(one, seq_len, rows, tokens, None)
        speculative.append_tokens(two, seq_len, rows, tokens, None)
        assert torch.equal(one[:, :-1], two[:, :-1])
