"""Rows that have ended on the device while the host does not know yet: they do nothing, and nobody notices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scheduler_proc.plan import StepResult
from tests.unit.worker.steps import PAGE, Steps


def steps_of(max_graph_rows: int) -> Steps:
    return Steps(max_graph_rows=max_graph_rows)


def tokens_of(results: list[StepResult], row: int) -> list[int]:
    return [int(result.tokens[row, 0]) for result in results]


@pytest.mark.parametrize("max_graph_rows", [0, 1, 4])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_that_has_ended_draws_nothing(max_graph_rows: int, sampled: bool) -> None:
    sampling = {"temperature": 1.5, "top_k": 40} if sampled else {}
    steps = steps_of(0)
    for slot in (0, 1, 2):
        steps.join(slot, [5 + slot, 6, 7], **sampling, seed=slot)
    steps.run(steps.plan(chunks={0: 3, 1: 3, 2: 3}))
    plain = steps.run(*(steps.plan(decode=[0, 1, 2]) for _ in range(8)))
    # The first token of the row that it had not drawn before.
    own = tokens_of(plain, 1)
    end = next(
        index for index in range(2, 8) if own[index] not in own[:index] and own[index] not in tokens_of(plain, 0)
    )

    steps = steps_of(max_graph_rows)
    for slot in (0, 1, 2):
        steps.join(slot, [5 + slot, 6, 7], **sampling, seed=slot, stops=[own[end]] if slot == 1 else [])
    steps.run(steps.plan(chunks={0: 3, 1: 3, 2: 3}))
    results = steps.run(*(steps.plan(decode=[0, 1, 2]) for _ in range(8)))
    assert tokens_of(results, 0) == tokens_of(plain, 0)
    assert tokens_of(results, 2) == tokens_of(plain, 2)
    assert tokens_of(results, 1) == [*own[: end + 1], *[0] * (7 - end)]
    # Its length goes on, so that host and device agree on it.
    assert steps.runner.slots.seq_len[1] == 3 + 8


@pytest.mark.parametrize("max_graph_rows", [0, 4])
def test_it_writes_to_no_page_of_anybody(max_graph_rows: int) -> None:
    steps = steps_of(0)
    steps.join(0, [5, 6, 7])
    first = int(steps.run(steps.plan(chunks={0: 3}))[0].tokens[0, 0])
    steps = steps_of(max_graph_rows)
    steps.join(0, [5, 6, 7], stops=[first])
    steps.join(1, [5, 6, 7])
    steps.run(steps.plan(chunks={0: 3, 1: 3}))
    pool = steps.runner.kv_pool.layers
    pages = steps.runner.slots.page_table[0].long()
    for layer in pool:
        layer[pages] = torch.nan
    # Decoding, beside a prompt, and decoding again.
    steps.join(2, [9, 9, 9, 9])
    plans = [steps.plan(decode=[0, 1]), steps.plan(decode=[0, 1], chunks={2: 4}), steps.plan(decode=[0, 1, 2])]
    results = steps.run(*plans)
    for layer in pool:
        assert layer[pages].isnan().all()
    for result in results:
        assert result.failed is None and result.tokens[0, 0] == 0


@pytest.mark.parametrize("max_graph_rows", [0, 4])
def test_the_next_occupant_begins_anew(max_graph_rows: int) -> None:
    steps = steps_of(max_graph_rows)
    steps.join(0, [5, 6, 7])
    steps.run(steps.plan(chunks={0: 3}))
    plain = tokens_of(steps.run(*(steps.plan(decode=[0]) for _ in range(4))), 0)
    steps.join(0, [5, 6, 7], stops=[plain[0], 3, 4])
    steps.run(steps.plan(chunks={0: 3}), *(steps.plan(decode=[0]) for _ in range(3)))
    steps.join(0, [5, 6, 7])
    steps.run(steps.plan(chunks={0: 3}))
    assert tokens_of(steps.run(*(steps.plan(decode=[0]) for _ in range(4))), 0) == plain


def test_filled_up_batches_touch_only_scratch() -> None:
    """Three rows in a batch of four: the fourth is nobody's."""
    steps = steps_of(4)
    for slot in range(3):
        steps.join(slot, [5, 6, 7 + slot])
    steps.run(steps.plan(chunks=dict.fromkeys(range(3), 3)))
    pool = steps.runner.kv_pool.layers
    before = [layer.clone() for layer in pool]
    seq_len = steps.runner.slots.seq_len.clone()
    steps.run(steps.plan(decode=[0, 1, 2]))
    changed = torch.stack([(old != new).flatten(1).any(dim=1) for old, new in zip(before, pool, strict=True)])
    pages = {int(steps.runner.slots.page_table[slot, 3 // PAGE]) for slot in range(3)}
    scratch = len(pool[0]) - 1
    assert set(torch.nonzero(changed.any(dim=0)).flatten().tolist()) <= pages | {scratch}
    assert steps.runner.slots.seq_len.tolist() == (seq_len + torch.tensor([1, 1, 1, 0, 0, 0, 0])).tolist()
    assert np.all(steps.runner.slots.ended.numpy() == [False] * 6 + [True])
