"""What the audit sees, what it finds after an admission that broke half-way, and how often it is made."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from scheduler_proc import process
from tests.support.scheduler import Harness, expected_null_tokens, pages_kept


def running(tmp_path: Path) -> Harness:
    harness = Harness(tmp_path, num_slots=2)
    for number in (1, 2, 3):
        harness.add(number, 40, max_tokens=20)
    harness.turn(3)
    assert harness.workload.audit() == []
    return harness


def test_it_misses_a_lock(tmp_path: Path) -> None:
    harness = running(tmp_path)
    harness.cache._locks[0] = None
    found = " ".join(harness.workload.audit())
    assert "slot 0: without a lock" in found
    assert "2 locks live, 1 are held" in found


def test_it_sees_a_lock_too_many(tmp_path: Path) -> None:
    harness = running(tmp_path)
    assert harness.cache.tree is not None
    harness.cache.hold(harness.cache.match(harness.planner.admission.waiting[3]))
    assert any("3 locks live, 2 are held" in line for line in harness.workload.audit())


def test_it_misses_a_request(tmp_path: Path) -> None:
    harness = running(tmp_path)
    admission, requests = harness.planner.admission, harness.workload.requests
    waiting = admission.waiting.pop(3)
    assert any("request 3: not in one place" in line for line in harness.workload.audit())
    admission.waiting[3] = waiting
    running_one = requests.pop(1)
    assert any("occupant 1 has ended" in line for line in harness.workload.audit())
    requests[1] = running_one
    admission.waiting[1] = running_one
    assert any("request 1: not in one place" in line for line in harness.workload.audit())


def test_it_sees_that_occupants_and_slots_disagree(tmp_path: Path) -> None:
    harness = running(tmp_path)
    harness.slots.occupant[1] = None
    assert any("1 slots have an occupant, 2 are in use" in line for line in harness.workload.audit())


def test_a_start_from_the_cache_that_fails_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(tmp_path, num_slots=2)
    harness.add(1, 40, max_tokens=2)
    harness.run()
    table = harness.cache.tables[0]
    begin = table.begin

    def broken(slot: int, pages: np.ndarray) -> None:
        begin(slot, pages)
        monkeypatch.undo()
        raise RuntimeError("begin broke")

    monkeypatch.setattr(table, "begin", broken)
    harness.add(2, 40, max_tokens=2)
    harness.add(3, 40, max_tokens=5)
    harness.turn()
    assert harness.workload.audit() == []
    harness.run()
    assert set(harness.errors) == {2}
    assert harness.tokens[3] == expected_null_tokens(40, 5)
    assert harness.slots.num_free == 2
    assert pages_kept(harness)


@pytest.mark.parametrize(("small", "audits"), [(1000, 6), (0, 2)])
def test_a_large_tree_is_not_audited_at_every_idle_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int, audits: int
) -> None:
    harness = Harness(tmp_path)
    now, num = 1000.0, 0
    monkeypatch.setattr(process, "SMALL_TREE", small)
    monkeypatch.setattr(process.time, "monotonic", lambda: now)
    audit_idle = harness.workload.audit_idle

    def counting() -> None:
        nonlocal num
        num += 1
        audit_idle()

    monkeypatch.setattr(harness.workload, "audit_idle", counting)

    def idle(turns: int) -> None:
        left = turns

        def stopped() -> bool:
            nonlocal left
            left -= 1
            return left < 0

        harness.scheduler.run(stopped)

    for number in range(6):
        harness.add(number, 20, max_tokens=2)
        idle(10)
        now += 0.5
    assert num == audits - (small == 0)
    # What was left out is made up for.
    now += process.AUDIT_EVERY_S
    idle(2)
    assert num == audits
    idle(2)
    assert num == audits
