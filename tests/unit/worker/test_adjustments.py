"""Penalties, bias and early ends through whole steps, against one forward pass and rules written out token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.dispatch import KernelSet
from kernels.logits import adjust_logits
from kernels.sampling import sample
from scheduler_proc.plan import Joins
from scheduler_proc.worker.adjustments import Adjustments
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.rehearsal import Rehearsal
from scheduler_proc.worker.transfer import Transfer
from tests.unit.kernels.wishes import Wish, naive, random_wish
from tests.unit.models.paging import cpu_kernels
from tests.unit.worker.steps import MAX_LEN, PAGE, VOCAB, Occupant, Steps, adjustment_of, logits_of

PENALTIES = Wish(repetition=1.4, presence=0.5, frequency=0.8)


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    """Random ids, about half of them twice."""
    ids = rng.integers(3, VOCAB, length).tolist()
    return [*ids[: -(-length // 2)], *ids[: length // 2]]


def expected(occupant: Occupant) -> list[int]:
    """What the occupant should have drawn, token by token, from logits made in one pass."""
    tokens = [*occupant.known, *occupant.drawn]
    logits = logits_of(tokens)
    found = []
    for length in range(len(occupant.known), len(tokens)):
        row = logits[length - 1]
        if occupant.wish is not None:
            wish = replace(occupant.wish, output=tokens[len(occupant.prompt) : length])
            row = naive(row, wish, length)
        found.append(draw(row, length, occupant.sampling))
    return found


def draw(row: np.ndarray, length: int, sampling: dict[str, float]) -> int:
    def value(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([sampling.get(name, default)], dtype=dtype)

    tokens = sample(
        torch.from_numpy(row).unsqueeze(0),
        value("temperature", 0.0, torch.float32),
        value("top_k", -1, torch.int32),
        value("top_p", 1.0, torch.float32),
        value("min_p", 0.0, torch.float32),
        value("seed", 0, torch.int64),
        torch.tensor([length]),
        needs_filter=True,
        all_greedy=False,
    )
    return int(tokens[0])


@pytest.mark.parametrize("max_graph_rows", [0, 4, 6])
@pytest.mark.parametrize("seed", range(4))
def test_random_batches(seed: int, max_graph_rows: int) -> None:
    """Joins, chunks, decoding, resumed output and reused slots in any order; results seen up to 3 steps late."""
    rng = np.random.default_rng(seed)
    steps = Steps(max_graph_rows=max_graph_rows)
    gone: list[Occupant] = []
    for _ in range(12):
        plans = []
        for _ in range(int(rng.integers(1, 4))):
            for slot in range(6):
                occupant = steps.slots.get(slot)
                free = occupant is None or (occupant.done > len(occupant.known) + 8 and not plans)
                if free and rng.random() < 0.3:
                    if occupant is not None:
                        gone.append(occupant)
                    wish = random_wish(rng, VOCAB) if rng.random() < 0.7 else None
                    sampling = {} if rng.random() < 0.5 else {"temperature": 0.9, "top_k": 30, "seed": slot + 1}
                    output = prompt(rng, int(rng.integers(0, 7)))
                    steps.join(slot, prompt(rng, int(rng.integers(1, 12))), output, wish, **sampling)
            decode, chunks = [], {}
            for slot, occupant in steps.slots.items():
                left = len(occupant.known) - occupant.done
                if left > 0:
                    chunks[slot] = int(rng.integers(1, left + 1))
                elif rng.random() < 0.9:
                    decode.append(slot)
            if decode or chunks:
                plans.append(steps.plan(decode, chunks))
        steps.run(*plans)
    seen = [occupant for occupant in [*gone, *steps.slots.values()] if occupant.drawn]
    assert len(seen) > 5
    for occupant in seen:
        assert occupant.drawn == expected(occupant), occupant


def test_counts_advance_on_the_device() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7], wish=replace(PENALTIES, frequency=2.0, bias={9: 12.0}))
    steps.join(1, [5, 6, 7])
    plans = [steps.plan(chunks={0: 3, 1: 3}), *(steps.plan(decode=[0, 1]) for _ in range(12))]
    steps.run(*plans)
    assert steps.slots[0].drawn == expected(steps.slots[0])
    assert steps.slots[1].drawn == expected(steps.slots[1])
    counts = steps.runner.adjustments.penalties.output_counts
    assert counts[0].tolist() == np.bincount(steps.slots[0].drawn, minlength=VOCAB).tolist()


def test_resumed_output_counts_as_if_never_interrupted() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7, 5], wish=PENALTIES)
    steps.run(steps.plan(chunks={0: 4}), *(steps.plan(decode=[0]) for _ in range(9)))
    whole = steps.slots[0].drawn
    steps.join(0, [5, 6, 7, 5], whole[:4], wish=PENALTIES)
    steps.run(steps.plan(chunks={0: 8}), *(steps.plan(decode=[0]) for _ in range(5)))
    assert whole[:4] + steps.slots[0].drawn == whole


def test_no_end_before_its_time() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7])
    steps.run(steps.plan(chunks={0: 3}), *(steps.plan(decode=[0]) for _ in range(5)))
    plain = steps.slots[0].drawn
    end = plain[0]
    steps.join(0, [5, 6, 7], wish=Wish(ends=[VOCAB + 5, end], min_len=6))
    steps.join(1, [5, 6, 7], wish=Wish(ends=[end], min_len=6, bias={end: 100.0}))
    steps.join(2, [5, 6, 7], wish=Wish(bias={end: 100.0}))
    steps.run(steps.plan(chunks={0: 3, 1: 3, 2: 3}), *(steps.plan(decode=[0, 1, 2]) for _ in range(5)))
    assert end not in steps.slots[0].drawn[:3] and end not in steps.slots[1].drawn[:3]
    assert steps.slots[1].drawn[3:] == [end] * 3
    assert steps.slots[2].drawn == [end] * 6


def test_the_next_occupant_of_a_slot_starts_clean() -> None:
    steps = Steps()
    for wish in (replace(PENALTIES, bias={9: 100.0}, ends=[11], min_len=30), None, Wish(bias={4: 1.0}), None):
        steps.join(0, [5, 6, 7, 8], wish=wish)
        steps.join(1, [5, 6, 7], wish=PENALTIES)
        steps.run(steps.plan(chunks={0: 4, 1: 3}), *(steps.plan(decode=[0, 1]) for _ in range(4)))
        assert steps.slots[0].drawn == expected(steps.slots[0])
        assert steps.slots[1].drawn == expected(steps.slots[1])


def test_what_a_failed_step_was_told_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7], [8, 8, 9], wish=PENALTIES)
    lost = steps.plan(chunks={0: 3})
    set_pages = DeviceSlots.set_pages
    calls = []

    def broken(self: DeviceSlots, updates: object) -> None:
        calls.append(updates)
        if len(calls) <= 2:
            raise RuntimeError("set_pages broke")
        set_pages(self, updates)  # type: ignore[arg-type]

    monkeypatch.setattr(DeviceSlots, "set_pages", broken)
    with pytest.raises(RuntimeError, match="set_pages broke"):
        steps.runner.run(lost)
    steps.join(1, [5, 6, 7], [8, 8, 9], wish=PENALTIES)
    with pytest.raises(RuntimeError, match="set_pages broke"):
        steps.runner.run(steps.plan(chunks={1: 2}))
    # Those that joined with these steps have failed with them: the next ones in their slots are told anew.
    for slot in (0, 1):
        steps.join(slot, [5, 6, 7], [8, 8, 9], wish=PENALTIES)
    steps.run(steps.plan(chunks={0: 6, 1: 6}))
    counts = steps.runner.adjustments.penalties.output_counts
    for slot in (0, 1):
        steps.slots[slot].output += steps.slots[slot].drawn
        assert counts[slot].tolist() == np.bincount(steps.slots[slot].output, minlength=VOCAB).tolist()


def test_a_row_of_nan_fails_and_harms_nobody() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7], wish=replace(PENALTIES, ends=[3], min_len=90))
    steps.join(1, [5, 6, 7], wish=PENALTIES)
    steps.run(steps.plan(chunks={0: 3, 1: 3}))
    page = steps.runner.slots.page_table[0, 0]
    steps.runner.kv_pool.layers[0][page] = torch.nan
    failing, *later = steps.run(*(steps.plan(decode=[0, 1]) for _ in range(3)))
    assert failing.failed is not None and failing.failed.tolist() == [True, False]
    for result in later:
        # The row has ended on the device.
        assert result.failed is None and result.tokens[0].tolist() == [0]
    assert steps.slots[1].drawn == expected(steps.slots[1])


def test_tables_hold_only_who_needs_them() -> None:
    steps = Steps(num_slots=32)
    tables = steps.runner.adjustments
    assert tables.penalties.output_counts.numel() == tables.edits.bias_ids.numel() == 0
    for slot in range(3):
        steps.join(slot, [5, 6], wish=Wish(bias={7: 1.0}))
    steps.run(steps.plan(chunks={0: 2, 1: 2, 2: 2}))
    assert tables.penalties.output_counts.numel() == 0
    for slot in range(5):
        steps.join(slot, [5, 6], wish=PENALTIES)
    steps.run(steps.plan(chunks=dict.fromkeys(range(5), 2)))
    before = len(tables.penalties.output_counts)
    for _ in range(6):
        for slot in range(5):
            steps.join(slot, [5, 6], wish=PENALTIES)
        steps.run(steps.plan(chunks=dict.fromkeys(range(5), 2)))
    assert 5 <= len(tables.penalties.output_counts) == before <= 8


def test_as_many_entries_as_slots() -> None:
    steps = Steps(num_slots=6)
    for slot in range(6):
        steps.join(slot, [5, 6, 7 + slot], wish=replace(PENALTIES, bias={slot: 3.0}, ends=[9], min_len=5))
    steps.run(steps.plan(chunks=dict.fromkeys(range(6), 3)), steps.plan(decode=range(6)))
    for occupant in steps.slots.values():
        assert occupant.drawn == expected(occupant)
    assert len(steps.runner.adjustments.penalties.output_counts) == 6


def test_plain_steps_do_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a plain step pays for what it does not use")

    kernels: KernelSet = replace(
        cpu_kernels(), adjust_logits=forbidden, processed_logits=forbidden, score_tokens=forbidden
    )
    monkeypatch.setattr(Adjustments, "rows_of", forbidden)
    monkeypatch.setattr(Adjustments, "count", forbidden)
    steps = Steps(kernels=kernels)
    steps.join(0, [5, 6, 7], wish=PENALTIES)
    steps.join(1, [5, 6, 7], temperature=0.7, seed=3)
    # The slot with penalties does not sample here.
    [_, result] = steps.run(steps.plan(chunks={0: 2, 1: 3}), steps.plan(decode=[1]))
    assert result.scores is None and result.prompt_scores == ()


def test_ends_of_others_are_not_held_back() -> None:
    """Entries with more and fewer ends and biases than the one before, in a table that is as wide as the widest."""
    tables = Adjustments(4, VOCAB, Transfer(torch.device("cpu")))
    wishes: dict[int, Wish] = {}
    for slot, ends in ((0, [5]), (1, [7, 8, 9]), (1, [3]), (2, []), (0, [6, 11]), (3, [8, 2, 9, 40])):
        wishes[slot] = Wish(bias={20 + end: 2.0 for end in ends} or {1: 1.0}, ends=ends, min_len=50)
        tables.join(joins_of(slot, wishes[slot]))
        logits = torch.randn(len(wishes), VOCAB)
        before = logits.clone().numpy()
        rows = tables.rows_of(np.array(list(wishes), np.int32))
        adjust_logits(logits, torch.full((len(wishes),), 49), tables.penalties, tables.edits, rows)
        for row, wish in enumerate(wishes.values()):
            np.testing.assert_array_equal(logits[row].numpy(), naive(before[row], wish, 49))


def joins_of(slot: int, wish: Wish) -> Joins:
    one = np.ones(1, np.int32)
    sampling = (one * 1.0, one * 1.0, one, one * 0.0, one.astype(np.int64))
    return Joins(one * slot, one, *sampling, np.zeros((1, 0), np.int32), (adjustment_of(slot, wish),))


def test_a_join_that_fails_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps()
    with monkeypatch.context() as patch:
        patch.setattr(Adjustments, "_set_penalties", lambda *args: (_ for _ in ()).throw(MemoryError("no room")))
        steps.join(0, [5, 6, 7], wish=PENALTIES)
        with pytest.raises(MemoryError):
            steps.runner.run(steps.plan(chunks={0: 3}))
        # Others go on, whoever joins them.
        steps.join(1, [5, 6, 7])
        steps.run(steps.plan(chunks={1: 3}), steps.plan(decode=[1]))
        assert steps.slots[1].drawn == expected(steps.slots[1])
    steps.join(0, [5, 6, 7], wish=PENALTIES)
    steps.run(steps.plan(decode=[1], chunks={0: 3}), steps.plan(decode=[0, 1]))
    assert steps.slots[0].drawn == expected(steps.slots[0])


def test_rehearsals_leave_nothing_behind() -> None:
    steps = Steps()
    slots = steps.runner.slots
    before = [tensor.clone() for tensor in (*vars(slots.tensors).values(), *slots.sampling)]
    rehearsal = Rehearsal(steps.runner, 6 * MAX_LEN // PAGE, PAGE, MAX_LEN)
    rehearsal.decode(3)
    rehearsal.prompts([1, 1, 40], 70, 2)
    rehearsal.prompts([MAX_LEN])
    rehearsal.extras(4)
    rehearsal.clear()
    after = (*vars(slots.tensors).values(), *slots.sampling)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert not steps.runner.adjustments.adjusts(np.arange(6)).any()
    steps.join(0, [5, 6, 7], wish=PENALTIES)
    steps.join(1, [5, 6, 7])
    steps.run(steps.plan(chunks={0: 3, 1: 3}), steps.plan(decode=[0, 1]))
    for slot in (0, 1):
        assert steps.slots[slot].drawn == expected(steps.slots[slot])
