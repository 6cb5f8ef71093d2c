"""What decoding rows are found to have in common: pages of the tree, as many as save most, and nothing that is not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scheduler_proc.cache.page_table import PageTable
from scheduler_proc.common_prefix import common_lens
from scheduler_proc.plan import Handle, StepPlan
from scheduler_proc.worker.null import NullDevice
from tests.support.scheduler import VOCAB, Harness

PAGE = 4


def table_of(fronts: Sequence[Sequence[int]], tails: int = 3) -> PageTable:
    """Each slot's pages of the tree, and some of its own behind them."""
    table = PageTable(len(fronts), 64)
    for slot, pages in enumerate(fronts):
        table.begin(slot, np.array(pages, np.int32))
        table.extend(slot, 1000 + 10 * slot + np.arange(tails, dtype=np.int32))
    return table


def found(fronts: Sequence[Sequence[int]], least_saved: int = 1) -> list[int] | None:
    lens = common_lens(table_of(fronts), np.arange(len(fronts), dtype=np.int32), PAGE, least_saved)
    return None if lens is None else (lens // PAGE).tolist()


@pytest.mark.parametrize(
    ("fronts", "expected"),
    [
        ([[1, 2, 3], [1, 2, 4], [1, 2, 3]], [2, 2, 2]),
        ([[1, 2, 3], [1, 2, 3]], [3, 3]),
        # Others do not count, wherever they are.
        ([[7, 8], [1, 2, 3], [], [1, 2, 9]], [0, 2, 0, 2]),
        # More rows with less in common may save less.
        ([[1, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 3, 4, 7]], [0, 4, 4, 4]),
        ([[1, 5], [1, 6], [1, 7], [1, 2, 3], [1, 2, 4]], [1, 1, 1, 1, 1]),
        # A row that follows another one only as far as it goes.
        ([[1, 2, 3, 4], [1, 2], [1, 2, 3, 4]], [2, 2, 2]),
        ([[1, 2], [3, 4], [5, 6]], None),
        ([[], [], []], None),
        ([[1, 2, 3]], None),
        ([], None),
    ],
)
def test_the_pages_that_save_most(fronts: list[list[int]], expected: list[int] | None) -> None:
    assert found(fronts) == expected


def test_who_branches_off_early_hides_nothing() -> None:
    """Wherever among the rows they are, and however long what they have for themselves."""
    shared = list(range(1, 20))
    fronts = [[1, 500, *range(600, 640)], *([*shared, 30 + i] for i in range(5)), [1, 501], [], [1, 2, 502]]
    assert found(fronts) == [0, *[19] * 5, 0, 0, 0]


def test_too_little_is_nothing() -> None:
    fronts = [[1, 2, 3]] * 5
    assert found(fronts, 4 * 3 * PAGE) == [3] * 5
    assert found(fronts, 4 * 3 * PAGE + 1) is None


def test_own_pages_are_nobody_elses() -> None:
    """What is behind the tree's pages may be anything, also what was left by who was there before."""
    table = table_of([[1, 2], [1, 2]])
    table.pages[:, 2:] = 9
    assert common_lens(table, np.arange(2, dtype=np.int32), PAGE, 1).tolist() == [8, 8]


class _Seen(NullDevice):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> Handle:
        self.plans.append(plan)
        return super().launch(plan)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_plans_tell_of_it(depth: int, tmp_path: Path) -> None:
    device = _Seen()
    harness = Harness(tmp_path, device=device, depth=depth, step_tokens=256, most_common_rows=8, least_common=1)
    prompts = [[*range(10, 60), 100 + number, *range(10)] for number in range(3)]
    # Computed at once: what is the same in them becomes so only when the step is done.
    for number in range(2):
        harness.add(number, prompts[number], max_tokens=12)
    harness.turn(6)
    harness.add(2, prompts[2], max_tokens=3)
    harness.run()
    steady = [plan for plan in device.plans if plan.num_decode == len(plan.rows)]
    told = [(len(plan.rows), None if plan.common_lens is None else plan.common_lens.tolist()) for plan in steady]
    assert (2, [48, 48]) in told[:4] and (3, [48, 48, 48]) in told
    assert all(lens is None for rows, lens in told if rows == 1)
    # Also of steps in which a row is not there any more that the host has not seen end.
    assert all(lens is not None for rows, lens in told[4:] if rows > 1)
    for before, plan in itertools.pairwise(steady):
        if plan.rows_version == before.rows_version:
            assert plan.common_lens is before.common_lens
    assert all(plan.common_lens is None for plan in device.plans if plan.num_decode < len(plan.rows))
