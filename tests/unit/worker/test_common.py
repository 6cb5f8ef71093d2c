"""Decode steps whose rows have a prefix in common: what attention is told of it in their graphs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, CommonPrefix, paged_attention
from scheduler_proc.worker.graph_forward import COMMON_FROM, common_sizes
from tests.unit.models.paging import cpu_kernels
from tests.unit.worker.steps import PAGE, Steps, new_decoder

ROWS = COMMON_FROM + 1


class Told:
    """What the batches of steps say."""

    def __init__(self) -> None:
        self.last: CommonPrefix | None = None

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        self.last = batch.common
        return paged_attention(q, kv, batch, spec, lse)


def test_sizes() -> None:
    assert common_sizes(256) == [16, 32, 64, 128, 192, 256]
    assert common_sizes(40) == [16, 32, 40] and common_sizes(16) == [16] and common_sizes(15) == []


def test_attention_is_told() -> None:
    told = Told()
    kernels = replace(cpu_kernels(), paged_attention=told)
    steps = Steps(num_slots=2 * COMMON_FROM, decoder=new_decoder(kernels), max_graph_rows=2 * COMMON_FROM)
    for slot in range(ROWS):
        steps.join(slot, [5 + slot % 7, *range(6, 6 + 2 * PAGE)])
    steps.run(steps.plan(chunks=dict.fromkeys(range(ROWS), 2 * PAGE + 1)))
    everybody = list(range(ROWS))
    steps.run(steps.plan(decode=everybody))
    assert told.last is None
    table = steps.runner.slots.page_table
    for leader, length in ((3, 2 * PAGE), (0, PAGE)):
        lens = np.zeros(ROWS, np.int32)
        lens[leader:-1:2] = length
        plan = steps.plan(decode=everybody)
        steps.run(msgspec.structs.replace(plan, common_lens=lens, rows_version=plan.step))
        assert told.last is not None
        assert told.last.lens.tolist() == [*lens.tolist(), *[0] * (COMMON_FROM - 1)]
        assert told.last.page_table.tolist() == table[leader : leader + 1].tolist()
    few = steps.plan(decode=everybody[:3])
    steps.run(msgspec.structs.replace(few, common_lens=np.full(3, PAGE, np.int32), rows_version=few.step))
    assert told.last is not None and told.last.lens.tolist() == [PAGE] * 3 + [0] * (COMMON_FROM - 3)
    steps.run(steps.plan(decode=everybody))
    assert told.last is None


def test_what_is_told_changes_nothing() -> None:
    results = []
    for lens in (None, np.full(ROWS, PAGE, np.int32)):
        steps = Steps(num_slots=ROWS, max_graph_rows=ROWS)
        for slot in range(ROWS):
            steps.join(slot, [5 + slot, 6, 7, 8, 9, 10])
        steps.run(steps.plan(chunks=dict.fromkeys(range(ROWS), 6)))
        plans = [steps.plan(decode=list(range(ROWS))) for _ in range(4)]
        found = steps.run(*(msgspec.structs.replace(plan, common_lens=lens) for plan in plans))
        results.append([result.tokens.tolist() for result in found])
    assert results[0] == results[1]
