"""Decode steps whose rows have a prefix in common: what attention is told of it in their graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.ipc.messages import Abort
from kernels.attention import AttentionBatch, AttentionSpec, CommonPrefix, paged_attention
from scheduler_proc.common_prefix import LEAST_ROWS
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.worker.graph_forward import common_sizes
from tests.support.scheduler import Harness
from tests.unit.models.paging import cpu_kernels
from tests.unit.worker.steps import MAX_STOPS, PAGE, VOCAB, Steps, new_decoder

ROWS = LEAST_ROWS + 1


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
    steps = Steps(num_slots=2 * LEAST_ROWS, decoder=new_decoder(kernels), max_graph_rows=2 * LEAST_ROWS)
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
        assert told.last.lens.tolist() == [*lens.tolist(), *[0] * (LEAST_ROWS - 1)]
        assert told.last.page_table.tolist() == table[leader : leader + 1].tolist()
    few = steps.plan(decode=everybody[:3])
    steps.run(msgspec.structs.replace(few, common_lens=np.full(3, PAGE, np.int32), rows_version=few.step))
    assert told.last is not None and told.last.lens.tolist() == [PAGE] * 3 + [0] * (LEAST_ROWS - 3)
    steps.run(steps.plan(decode=everybody))
    assert told.last is None


class Reads:
    """Attention that has what rows have in common from nowhere but the pages that it is told of."""

    def __init__(self) -> None:
        self.is_on = False
        self.num_rows = self.num_ended = 0

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        common = batch.common
        if common is not None and self.is_on:
            lives = batch.kv_lens > 0
            assert (common.lens[lives] < batch.kv_lens[lives]).all()
            width = batch.page_table.shape[1]
            told = torch.arange(width) < (common.lens // PAGE).unsqueeze(1)
            table = torch.where(told, common.page_table[:, :width], batch.page_table)
            self.num_rows += int(told.any(1).sum())
            self.num_ended += int((~lives & told.any(1)).sum())
            batch = replace(batch, page_table=table, common=None)
        return paged_attention(q, kv, batch, spec, lse)


class PoisonedDevice:
    """The runner of a Steps; pages that come free hold nonsense at once."""

    def __init__(self, steps: Steps) -> None:
        self._runner = steps.runner

    def launch(self, plan: StepPlan) -> Handle:
        return Handle(plan, result=self._runner.launch(plan).result())

    def collect(self, handle: Handle) -> StepResult:
        assert isinstance(handle.result, StepResult)
        return handle.result

    def pages_freed(self, pages: np.ndarray) -> None:
        for layer in self._runner.kv_pool.layers:
            layer[torch.from_numpy(pages.astype(np.int64))] = 50.0

    def close(self) -> None:
        """Nothing to let go of."""


def life(folder: Path, seed: int, rows: int, reads: Reads) -> dict[int, list[int]]:
    """What requests get whose prompts begin alike, in part, while others come, end, and are cancelled or retracted."""
    draw = random.Random(seed)
    reads.is_on = False
    steps = Steps(
        num_slots=LEAST_ROWS,
        decoder=new_decoder(replace(cpu_kernels(), paged_attention=reads)),
        max_graph_rows=LEAST_ROWS,
    )
    reads.is_on = True
    harness = Harness(
        folder,
        device=PoisonedDevice(steps),
        num_slots=LEAST_ROWS,
        max_len=96,
        page_size=PAGE,
        num_pages=draw.choice([90, 200]),
        step_tokens=draw.choice([24, 64]),
        depth=seed % 3,
        vocab_size=VOCAB,
        policy=draw.choice(["fcfs", "priority"]),
        conservativeness=0.2,
        mixed_tokens=draw.choice([1, 16, 1 << 30]),
        most_common_rows=rows,
        least_common=1,
    )
    trunk = [draw.randrange(12, 100) for _ in range(40)]
    number = 0
    for _ in range(25):
        for _ in range(draw.randrange(3)):
            number += 1
            own = [draw.randrange(12, 100) for _ in range(draw.randrange(1, 6))]
            stops = tuple(range(5, 5 + MAX_STOPS - 1)) if draw.random() < 0.5 else ()
            prompt = trunk[: draw.choice([0, 8, 20, 40, 40])] + own
            harness.add(number, prompt, max_tokens=draw.randrange(1, 40), stop_token_ids=stops)
        if number and draw.random() < 0.08:
            harness.inbox.messages.append(Abort(draw.randrange(1, number + 1), 0))
        harness.turn(draw.randrange(1, 4))
    harness.run()
    assert not harness.errors
    return harness.tokens


def compare(folder: Path, seeds: range) -> Reads:
    """Each life with and without common prefixes."""
    reads = Reads()
    for seed in seeds:
        found = life(folder, seed, LEAST_ROWS, reads)
        expected = life(folder, seed, 0, reads)
        for number, tokens in found.items():
            # Who was cancelled may have got a little more or less.
            num = min(len(tokens), len(expected.get(number, [])))
            assert tokens[:num] == expected[number][:num], (seed, number)
    return reads


def test_lives_with_common_prefixes(tmp_path: Path) -> None:
    reads = compare(tmp_path, range(3))
    assert reads.num_rows > 500 and reads.num_ended > 0


@pytest.mark.slow
def test_many_lives_with_common_prefixes(tmp_path: Path) -> None:
    compare(tmp_path, range(100, 120))
