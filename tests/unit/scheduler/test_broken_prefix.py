"""KV that is not a number: no request that comes later finds it, whoever still holds it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import Abort, PinTokens, pack_i32
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.worker.null import NullDevice
from tests.support.scheduler import VOCAB, Harness, expected_null_tokens, pages_kept

PAGE = 16
PREFIX = list(range(3, 3 + 64))


class Poisonous(NullDevice):
    """The next chunk of a prompt that it computes is not a number, nor is what is computed from such a page."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.bad: set[int] = set()
        self.poisons_next = True
        self._pages: dict[tuple[int, int], int] = {}

    def launch(self, plan: StepPlan) -> Handle:
        for updates in plan.pages:
            if updates is not None:
                entries = zip(updates.slots.tolist(), updates.columns.tolist(), strict=True)
                self._pages.update(zip(entries, updates.pages.tolist(), strict=True))
        rows = zip(plan.rows.tolist(), plan.q_lens.tolist(), plan.kv_lens.tolist(), strict=True)
        for row, (slot, num, end) in enumerate(rows):
            begins = self.poisons_next and row >= plan.num_decode
            self.poisons_next &= not begins
            if begins or self._read(slot, end - num) & self.bad:
                self.bad |= {self._pages[slot, column] for column in range((end - num) // PAGE, -(-end // PAGE))}
        return super().launch(plan)

    def _read(self, slot: int, length: int) -> set[int]:
        return {self._pages[slot, column] for column in range(-(-length // PAGE))}

    def pages_freed(self, pages: np.ndarray) -> None:
        self.bad -= set(pages.tolist())

    def collect(self, handle: Handle) -> StepResult:
        result, plan = super().collect(handle), handle.plan
        ends = zip(plan.rows.tolist(), plan.kv_lens.tolist(), strict=True)
        result.failed = plan.sample & np.array([bool(self._read(slot, end) & self.bad) for slot, end in ends])
        return result


def ask_later(harness: Harness) -> None:
    """Requests with the prefix are answered, and find it cached from the second on."""
    for number in (100, 101, 102):
        harness.add(number, [*PREFIX, *range(500 + number, 520 + number)], max_tokens=4)
        harness.run()
        assert harness.tokens[number] == expected_null_tokens(84, 4)
    assert harness.cached[100] == 0
    assert harness.cached[101] == harness.cached[102] == 64
    assert not harness.device.bad  # type: ignore[attr-defined]
    assert pages_kept(harness)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_chunk_that_another_request_holds(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, device=Poisonous(), depth=depth, max_len=512)
    harness.add(1, [*PREFIX, *range(200, 300)], max_tokens=4)
    harness.turn(1 + depth)
    harness.add(2, [*PREFIX, *range(400, 600)], max_tokens=4)
    while not harness.errors:
        harness.turn()
        assert harness.workload.audit() == []
    harness.run()
    assert set(harness.errors) == {1, 2}
    ask_later(harness)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_chunk_whose_request_went_away_before_it_knew(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, device=Poisonous(), depth=depth, max_len=512)
    harness.add(1, [*PREFIX, *range(200, 500)], max_tokens=4)
    harness.turn(2 + depth)
    harness.inbox.messages.append(Abort(1, 0))
    harness.run()
    harness.add(2, [*PREFIX, 9], max_tokens=4)
    harness.run()
    assert harness.errors[2].code == "nan"
    ask_later(harness)


def test_a_pin_does_not_keep_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(tmp_path, device=Poisonous(), max_len=512)
    harness.add(1, [*PREFIX, *range(200, 300)], max_tokens=4)
    harness.turn(1)
    answer = harness.workload.answer(PinTokens(0, 1, pack_i32(PREFIX), 1000.0, None))
    assert answer.values["tokens"] == 64
    harness.run()
    assert set(harness.errors) == {1}
    assert harness.cache.tree is not None
    assert harness.cache.tree.num_pins == 0
    assert "pin_dropped" in caplog.text
    ask_later(harness)


def test_who_still_runs_on_what_was_detached_ends_well_but_shares_nothing(tmp_path: Path) -> None:
    """The second one was let in on good pages; the first one's later pages are bad."""
    device = Poisonous()
    device.poisons_next = False
    harness = Harness(tmp_path, device=device, max_len=512, num_pages=64)
    harness.add(9, PREFIX, max_tokens=1)
    harness.run()
    harness.add(2, [*PREFIX, *range(400, 420)], max_tokens=60)
    harness.turn(3)
    device.poisons_next = True
    harness.add(1, [*PREFIX, *range(200, 220)], max_tokens=4)
    while 1 not in harness.errors:
        harness.turn()
        assert harness.workload.audit() == []
    harness.run()
    assert set(harness.errors) == {1}
    assert harness.tokens[2] == expected_null_tokens(84, 60)
    ask_later(harness)
