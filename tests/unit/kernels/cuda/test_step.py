"""Where steps begin and end, in Triton, against kernels.step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels import step as reference
from kernels.cuda import step
from kernels.step import SlotTensors
from tests.unit.kernels.slot_cases import UNTOUCHED, copy_of, empty_inputs, make_slots

SCRATCH = (1 << 33) + 5


def check_inputs(
    rows: Sequence[int],
    q_lens: Sequence[int] | None,
    host: Sequence[int] | None,
    slots: SlotTensors,
    page_size: int,
    empties_ended: bool,
    width: int | None = None,
) -> None:
    """Run both; of the page table, only what is in use is compared, and the rest must be untouched."""
    device, width = slots.seq_len.device, slots.page_table.shape[1] if width is None else width
    num_tokens = len(rows) if q_lens is None else sum(q_lens)
    starts = None if q_lens is None else torch.tensor([0, *q_lens], device=device).cumsum(0).int()
    told = None if host is None else torch.tensor(host, dtype=torch.int32, device=device)
    ids = torch.tensor(rows, dtype=torch.int64, device=device)
    expected, out = (empty_inputs(num_tokens, len(rows), width, device) for _ in range(2))
    expected_slots = copy_of(slots)
    reference.step_inputs(ids, starts, told, expected_slots, page_size, SCRATCH, empties_ended, expected)
    step.step_inputs(ids, starts, told, slots, page_size, SCRATCH, empties_ended, out)
    for name in ("tokens", "positions", "locations", "kv_lens"):
        assert torch.equal(getattr(out, name), getattr(expected, name)), name
    used = torch.arange(width, device=device) * page_size < expected.kv_lens.unsqueeze(1)
    assert torch.equal(out.page_table, torch.where(used, expected.page_table, UNTOUCHED))
    same(slots, expected_slots)


def same(slots: SlotTensors, expected: SlotTensors) -> None:
    for name in ("seq_len", "last_token", "ended", "stop_ids", "page_table"):
        assert torch.equal(getattr(slots, name), getattr(expected, name)), name


@pytest.fixture(params=[4, 2048])
def page_block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PAGE_BLOCK", request.param)


@pytest.mark.usefixtures("page_block")
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("empties_ended", [False, True])
def test_decode_rows(page_size: int, empties_ended: bool, device: torch.device) -> None:
    slots = make_slots([0, 5, 15, 16, 64], [1], page_size, 70, device=device)
    for _ in range(3):
        check_inputs([4, 1, 0, 2, 3], None, None, slots, page_size, empties_ended)
    check_inputs([5, 2, 5, 5, 1, 5], None, None, slots, page_size, empties_ended)


@pytest.mark.parametrize("token_block", [4, 1024])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("empties_ended", [False, True])
def test_rows_of_any_length(
    page_size: int, empties_ended: bool, token_block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "TOKEN_BLOCK", token_block)
    slots = make_slots([0, 5, 15, 16], [3], page_size, 70, device=device)
    check_inputs([2, 0, 3, 1], [1, 7, 2, 0], [-1, *range(7), 8, 9], slots, page_size, empties_ended)
    check_inputs([1, 3, 4, 4, 0], [20, 0, 1, 1, 1], [*range(20), -1, -1, -1], slots, page_size, empties_ended)
    check_inputs([0, 1], [4, 5], None, slots, page_size, empties_ended)


def test_host_tokens_of_decode_rows(device: torch.device) -> None:
    check_inputs([1, 0], None, [-1, 77], make_slots([3, 4], [], 16, 2, device=device), 16, True)


@pytest.mark.parametrize("width", [0, 3, 9])
def test_narrow_tables(width: int, device: torch.device) -> None:
    slots = make_slots([4, 47, 500], [2], 16, 40, device=device)
    check_inputs([0, 2, 1][: width // 3], None, None, slots, 16, False, width)


def test_an_ended_slot_may_be_longer_than_its_table(device: torch.device) -> None:
    for empties_ended in (False, True):
        check_inputs([0], None, None, make_slots([9], [0], 1, 4, device=device), 1, empties_ended)


def test_no_rows(device: torch.device) -> None:
    check_inputs([], None, None, make_slots([3], [], 16, 2, device=device), 16, True)
    check_inputs([], [], [], make_slots([3], [], 16, 2, device=device), 16, True)


def check_ends(rows: Sequence[int], drawn: Sequence[int], slots: SlotTensors) -> Tensor:
    device = slots.seq_len.device
    ids, tokens = (torch.tensor(x, dtype=t, device=device) for x, t in ((rows, torch.int64), (drawn, torch.int32)))
    expected_slots, expected = copy_of(slots), tokens.clone()
    reference.advance_ends(expected_slots, ids, expected)
    step.advance_ends(slots, ids, tokens)
    assert torch.equal(tokens, expected)
    same(slots, expected_slots)
    return slots.ended


def test_ends(device: torch.device) -> None:
    slots = make_slots([1] * 5, [2], 16, 2, [[7], [], [8, 9], [7, 0], [5]], device=device)
    ended = check_ends([4, 3, 2, 5, 5, 1, 0], [6, 0, 3, 1, -1, 7, -1], slots)
    assert ended.tolist() == [True, False, True, True, False, True]
    check_ends([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], slots)


def test_ends_of_many_rows(device: torch.device) -> None:
    stops = [[slot % 7, slot % 5 + 10] for slot in range(100)]
    slots = make_slots([1] * 100, range(0, 100, 9), 16, 2, stops, device=device)
    rows = [*range(99, -1, -1), 100, 100, 100]
    check_ends(rows, [slot % 11 - 1 for slot in rows], slots)


def test_ends_without_stop_ids_or_rows(device: torch.device) -> None:
    check_ends([1, 0], [3, -1], make_slots([1, 1], [], 16, 2, device=device))
    check_ends([], [], make_slots([1, 1], [], 16, 2, [[1], [2]], device=device))
