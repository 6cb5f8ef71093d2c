"""Steps of unchanged rows are kept as counts; whoever looks sees what row by row would have given."""

from __future__ import annotations

import numpy as np
import pytest

from engine.ipc.messages import RowReader, Stamps, TokenBatch
from engine.sampling import SamplingParams
from scheduler_proc.outbox import Outbox, SteadyRows
from scheduler_proc.request import Request
from scheduler_proc.slots import Slots, SlotState
from scheduler_proc.steady import BLOCK_STEPS


def make_request(number: int, prompt: list[int], sampling: SamplingParams) -> Request:
    ids = np.array(prompt, np.int32)
    return Request(
        number, 0, 0, "", ids, np.zeros(0, np.int32), sampling, True, sampling.max_tokens or 1, Stamps(), b"", 0,
        number, ids.astype(np.int64), b"",
    )  # fmt: skip


def slots_of(num: int, *, max_tokens: int = 500, stop_id: int = 9999) -> Slots:
    slots = Slots(num, 1000, 1)
    for number in range(1, num + 1):
        request: Request = make_request(
            number, [number] * (3 + number), SamplingParams(max_tokens=max_tokens, stop_token_ids=(stop_id,))
        )
        slot = slots.join(request, (), 0)
        slots.set_state(slot, SlotState.DECODE)
        slots.is_new[slot] = False
    slots.num_new = 0
    return slots


def test_collected_tokens_stand_where_they_belong_however_many_steps_went_by() -> None:
    slots = slots_of(3)
    rng = np.random.default_rng(0)
    given = rng.integers(0, 100, (3 * BLOCK_STEPS + 5, 3)).astype(np.int32)
    for tokens in given:
        assert slots.collect_steady(slots.decode(), tokens)
    for slot in range(3):
        assert slots.num_output(slot) == len(given)
        assert slots.output_ids(slot).tolist() == given[:, slot].tolist()
    assert slots.tokens[1, :5].tolist() == [2] * 5


def test_planned_lengths_and_the_last_step_are_there_when_asked_for() -> None:
    slots = slots_of(4)
    decode = slots.decode()
    for step in range(1, 6):
        lens = slots.plan_steady(decode, step)
        assert lens.tolist() == [step] * 4
        assert slots.planned_of(decode).tolist() == [step] * 4
    assert slots.planned.tolist() == [5] * 4
    assert slots.last_step.tolist() == [5] * 4
    assert slots.plan_steady(decode, 6).tolist() == [6] * 4


def test_a_slot_that_changes_hands_takes_nothing_from_the_run_before() -> None:
    slots = slots_of(2)
    for step in range(1, 4):
        slots.plan_steady(slots.decode(), step)
        assert slots.collect_steady(slots.decode(), np.array([7, 8], np.int32))
    slots.leave(1)
    slot = slots.join(make_request(9, [5] * 10, SamplingParams(max_tokens=4)), (), 0)
    assert slot == 1
    assert slots.planned.tolist() == [3, 0]
    assert slots.num_known.tolist() == [4 + 3, 10]
    assert slots.output_ids(1).tolist() == []


@pytest.mark.parametrize("why", ["length", "stop", "new"])
def test_a_row_that_may_end_or_begins_is_left_to_the_closer_look(why: str) -> None:
    slots = slots_of(2, max_tokens=1 if why == "length" else 100, stop_id=55)
    if why == "new":
        slots.num_new = 1
    tokens = np.array([1, 55 if why == "stop" else 2], np.int32)
    assert not slots.collect_steady(slots.decode(), tokens)
    assert slots.num_known.tolist() == [4, 5]


def steady(num: int) -> SteadyRows:
    ids = np.arange(1, num + 1)
    return SteadyRows(None, ids.astype(np.uint64), np.zeros(num, np.int32), (10 * ids).astype(np.int32))


def test_rows_are_named_once_and_then_meant() -> None:
    outbox, reader, rows = Outbox(), RowReader(), steady(3)
    sizes = []
    for step in range(4):
        outbox.add_steady(rows, np.full(3, step, np.int32))
        batch = outbox.take(step).tokens
        sizes.append(len(batch.requests))
        assert [(row[0], row[2]) for row in reader.rows(batch)] == [(n, 10 * n + step) for n in (1, 2, 3)]
    assert sizes == [24, 0, 0, 0]


def test_rows_beside_others_are_written_out_and_named_later() -> None:
    outbox, reader, rows = Outbox(), RowReader(), steady(2)
    outbox.add_steady(rows, np.array([1, 2], np.int32))
    outbox.add_steady(rows, np.array([3, 4], np.int32))
    batch = outbox.take(1).tokens
    assert [(row[0], row[2]) for row in reader.rows(batch)] == [(1, 10), (2, 20), (1, 11), (2, 21)]
    outbox.add_steady(rows, np.array([5, 6], np.int32))
    batch = outbox.take(2).tokens
    assert [(row[0], row[2]) for row in reader.rows(batch)] == [(1, 12), (2, 22)]


def test_rows_never_named_are_an_error() -> None:
    with pytest.raises(LookupError, match="rows 5"):
        list(RowReader().rows(TokenBatch(tokens=b"1234", rows=5)))


def test_a_message_that_was_not_sent_names_its_requests_and_the_next_one_names_the_rows_again() -> None:
    outbox, rows = Outbox(), steady(2)
    for _ in range(2):
        outbox.add_steady(rows, np.array([1, 2], np.int32))
        output = outbox.take(1)
    assert outbox.named_in(output) == ([1, 2], [0, 0])
    outbox.add_steady(rows, np.array([1, 2], np.int32))
    assert len(outbox.take(2).tokens.requests) == 16
