"""Where steps begin and end: the torch references against slow loops."""

from __future__ import annotations

import pytest
import torch

from kernels.step import SlotTensors, advance_ends, step_inputs
from tests.unit.kernels.slot_cases import copy_of, empty_inputs, make_slots

SCRATCH = 12345


def check_inputs(
    rows: list[int],
    q_lens: list[int] | None,
    host: list[int] | None,
    slots: SlotTensors,
    page_size: int,
    empties_ended: bool,
    width: int | None = None,
) -> None:
    """Run the reference, and compare with what a loop over rows and tokens says."""
    width = slots.page_table.shape[1] if width is None else width
    lens = [1] * len(rows) if q_lens is None else q_lens
    before = copy_of(slots)
    out = empty_inputs(sum(lens), len(rows), width)
    starts = None if q_lens is None else torch.tensor([0, *q_lens]).cumsum(0).int()
    told = None if host is None else torch.tensor(host, dtype=torch.int32)
    step_inputs(torch.tensor(rows, dtype=torch.int64), starts, told, slots, page_size, SCRATCH, empties_ended, out)
    tokens, positions, locations, kv_lens, seq_len = [], [], [], [], before.seq_len.tolist()
    for slot, q_len in zip(rows, lens, strict=True):
        ended, context = bool(before.ended[slot]), int(before.seq_len[slot])
        for position in range(context, context + q_len):
            given = -1 if host is None else host[len(tokens)]
            token = int(before.last_token[slot]) if given < 0 else given
            page = -1 if ended else int(before.page_table[slot, position // page_size])
            tokens.append(0 if ended else token)
            positions.append(0 if ended else position)
            locations.append(SCRATCH if ended else page * page_size + position % page_size)
        kv_lens.append(0 if ended and empties_ended else context + q_len)
        if slot < len(seq_len) - 1:
            seq_len[slot] = context + q_len
    assert out.tokens.tolist() == tokens and out.positions.tolist() == positions
    assert out.locations.tolist() == locations and out.kv_lens.tolist() == kv_lens
    assert slots.seq_len.tolist() == seq_len
    for i, (slot, kv_len) in enumerate(zip(rows, kv_lens, strict=True)):
        used = -(-kv_len // page_size)
        assert out.page_table[i, :used].tolist() == before.page_table[slot, :width][:used].tolist()
    for name in ("last_token", "ended", "stop_ids", "page_table"):
        assert torch.equal(getattr(slots, name), getattr(before, name))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("empties_ended", [False, True])
def test_decode_rows(page_size: int, empties_ended: bool) -> None:
    slots = make_slots([0, 5, 15, 16, 64], [1], page_size, 70)
    for _ in range(3):
        check_inputs([4, 1, 0, 2, 3, 5, 5], None, None, slots, page_size, empties_ended)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("empties_ended", [False, True])
def test_rows_of_any_length(page_size: int, empties_ended: bool) -> None:
    slots = make_slots([0, 5, 15, 16], [3], page_size, 70)
    check_inputs([2, 0, 3, 1], [1, 7, 2, 0], [-1, *range(7), 8, 9], slots, page_size, empties_ended)
    check_inputs([1, 3, 4, 0], [20, 0, 1, 1], [*range(20), -1, -1], slots, page_size, empties_ended)


def test_host_tokens_of_decode_rows() -> None:
    check_inputs([1, 0], None, [-1, 77], make_slots([3, 4], [], 16, 2), 16, True)


def test_narrow_tables() -> None:
    check_inputs([0, 2, 1], None, None, make_slots([4, 47, 500], [2], 16, 40), 16, False, 3)


def test_an_ended_slot_may_be_longer_than_its_table() -> None:
    check_inputs([0], None, None, make_slots([4], [0], 1, 4), 1, True)


def test_no_rows() -> None:
    check_inputs([], None, None, make_slots([3], [], 16, 2), 16, True)
    check_inputs([], [], [], make_slots([3], [], 16, 2), 16, True)


def check_ends(rows: list[int], drawn: list[int], slots: SlotTensors) -> None:
    before = copy_of(slots)
    tokens = torch.tensor(drawn, dtype=torch.int32)
    advance_ends(slots, torch.tensor(rows, dtype=torch.int64), tokens)
    last_token, ended, expected = before.last_token.tolist(), before.ended.tolist(), []
    for slot, token in zip(rows, drawn, strict=True):
        expected.append(0 if before.ended[slot] else token)
        last_token[slot] = max(expected[-1], 0)
        ended[slot] = ended[slot] or token < 0 or token in before.stop_ids[slot].tolist()
    assert tokens.tolist() == expected
    assert slots.last_token.tolist() == last_token and slots.ended.tolist() == ended
    assert torch.equal(slots.seq_len, before.seq_len)


def test_ends() -> None:
    slots = make_slots([1] * 5, [2], 16, 2, [[7], [], [8, 9], [7, 0], [5]])
    check_ends([4, 3, 2, 5, 5, 1, 0], [6, 0, 3, 1, -1, 7, -1], slots)
    assert slots.ended.tolist() == [True, False, True, True, False, True]
    check_ends([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], slots)


def test_ends_without_stop_ids_or_rows() -> None:
    check_ends([1, 0], [3, -1], make_slots([1, 1], [], 16, 2))
    check_ends([], [], make_slots([1, 1], [], 16, 2, [[1], [2]]))
