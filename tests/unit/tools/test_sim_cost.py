"""The device-time model: close to what was measured, and never below what reading the KV costs."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler_proc.plan import StepPlan
from tools.sim.cost import KV_TOKEN_MS, Load, fit, load_of, pairs_of


def test_residuals_are_bounded() -> None:
    errors = {name: abs(modelled / measured - 1) for name, measured, modelled in fit().residuals}
    assert max(errors.values()) < 0.12, errors
    assert max(error for name, error in errors.items() if name.startswith("decode")) < 0.05


def test_every_part_costs_something() -> None:
    cost = fit().cost
    assert min(cost.base, cost.decode_row, cost.prefill_token, cost.pair) > 0
    assert cost.kv_token == KV_TOKEN_MS
    # 131,072 bytes at 4,235 GB/s.
    assert cost.kv_token == pytest.approx(3.095e-5, rel=1e-3)


def test_chunks_have_the_pairs_of_the_whole_prompt() -> None:
    whole = pairs_of(np.array([1000]), np.array([1000]))
    parts = pairs_of(np.array([600, 400]), np.array([600, 1000]))
    assert whole == parts == 500_000


def test_a_mixed_step_counts_its_parts() -> None:
    plan = StepPlan(
        step=1,
        rows=np.array([4, 2, 9], np.int32),
        num_decode=2,
        q_lens=np.array([1, 1, 8], np.int32),
        kv_lens=np.array([10, 20, 24], np.int32),
        tokens=np.zeros(8, np.int32),
        sample=np.array([True, True, False]),
        all_greedy=True,
        needs_filter=False,
        rows_version=1,
        slots_version=-1,
        joins=None,
        pages=(None,),
    )
    assert load_of(plan) == Load(2, 30, 8, 8 * (24 - 4))
