"""How much is drafted, in a world whose costs and acceptance are known."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_proc.speculative.budget import DraftBudget, draft_sizes


class World:
    """Steps of `rows` rows take seconds that depend on drafts; a draft is accepted with some probability."""

    def __init__(self, most: int, cost: float, chance: float, rows: int = 1, seed: int = 0) -> None:
        self.now = 0.0
        self.cost, self.chance, self.rows = cost, chance, rows
        self.budget = DraftBudget(most, lambda: self.now)
        self.rng = np.random.default_rng(seed)
        self.base, self.jump = 0.01, 0.0
        self.tokens = 0
        self.drafts = 0

    def seconds(self, num_drafts: int) -> float:
        return self.base * (1.0 + self.cost * num_drafts + self.jump * (num_drafts > 0))

    def step(self, limit: int = 64) -> int:
        self.budget.begin_turn()
        num = self.budget.choose(self.rows, limit)
        hits = self.rng.random((self.rows, num)) < self.chance
        counts = (1 + np.cumprod(hits, axis=1).sum(axis=1)).astype(np.int32)
        self.now += self.seconds(num) * self.rng.uniform(0.97, 1.03)
        if num:
            self.budget.collected(self.rows, num, counts, np.full(self.rows, num, np.int32))
        else:
            self.budget.collected(self.rows, 0)
        self.tokens += int(counts.sum())
        self.drafts += num
        return num

    def rate(self, steps: int) -> float:
        tokens, began = self.tokens, self.now
        for _ in range(steps):
            self.step()
        return (self.tokens - tokens) / (self.now - began)

    def best(self) -> float:
        """Of all numbers of drafts, always taken."""

        def rate(num: int) -> float:
            expected = 1 + sum(self.chance**depth for depth in range(1, num + 1))
            return self.rows * expected / self.seconds(num)

        return max(rate(num) for num in (0, *self.budget.sizes))


def test_sizes() -> None:
    assert draft_sizes(7) == (1, 2, 4, 7) and draft_sizes(8) == (1, 2, 4, 8)
    assert draft_sizes(1) == (1,) and draft_sizes(0) == ()


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize(("cost", "chance"), [(0.02, 0.8), (0.1, 0.7), (0.3, 0.3), (1.0, 0.5), (0.05, 0.0), (3.0, 0.9)])
def test_near_the_best(cost: float, chance: float, rows: int) -> None:
    world = World(7, cost, chance, rows)
    world.rate(100)
    assert world.rate(4000) > 0.95 * world.best()


@pytest.mark.parametrize("cost", [0.2, 1.0, 5.0])
def test_what_does_not_pay_costs_little(cost: float) -> None:
    world = World(7, cost, 0.0)
    world.rate(100)
    assert world.rate(4000) > 0.98 * 100


def test_it_notices_when_drafting_begins_to_pay_and_when_it_ends() -> None:
    world = World(7, 0.05, 0.0)
    world.rate(1000)
    world.chance = 0.9
    world.rate(1500)
    assert world.rate(1000) > 0.9 * world.best()
    world.chance = 0.0
    world.rate(300)
    assert world.rate(2000) > 0.97 * 100


def test_it_notices_that_steps_without_drafts_have_become_faster() -> None:
    """Long contexts ended: what a step cost without drafts was measured at another time."""
    world = World(7, 0.02, 0.5)
    world.base = 0.06
    world.rate(500)
    world.base, world.cost, world.chance = 0.01, 1.0, 0.0
    world.rate(1500)
    assert world.rate(2000) > 0.95 * 100


def test_a_jump_in_cost_at_the_first_draft_hides_nothing() -> None:
    """All rows of a step cost as much as the one with most drafts: the first draft is dear, the others are not."""
    world = World(7, 0.0, 0.97, rows=8)
    world.jump = 2.0
    world.rate(4000)
    assert world.rate(2000) > 0.9 * world.best()


def test_no_more_than_the_limit() -> None:
    world = World(7, 0.01, 0.9)
    assert max(world.step(limit=2) for _ in range(200)) == 2
    assert max(world.step(limit=0) for _ in range(20)) == 0
    fixed = DraftBudget(7, lambda: 0.0, is_fixed=True)
    assert [fixed.choose(3, limit) for limit in (9, 5, 0)] == [7, 5, 0]


def test_turns_of_other_kinds_are_not_counted() -> None:
    """A prompt's step, two steps in one turn, and waiting leave no trace."""
    now = 0.0
    budget = DraftBudget(1, lambda: now)

    def turn(seconds: float, collected: int = 1, other: bool = False) -> None:
        nonlocal now
        budget.begin_turn()
        for _ in range(collected):
            budget.collected(1, 0)
        if other:
            budget.forget_turn()
        now += seconds

    for seconds, collected, other in (
        (0.01, 1, False),
        (9.0, 1, True),
        (9.0, 2, False),
        (9.0, 0, False),
        (0.01, 1, False),
    ):
        turn(seconds, collected, other)
    budget.begin_turn()
    (times,) = budget._times.values()
    assert times.counts == {0: 2} and times.seconds[0] == pytest.approx(0.01)
