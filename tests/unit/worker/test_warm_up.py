"""What runs before the first request stays within a request's longest length, its page table and the pool."""

from __future__ import annotations

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.model_files.types import ModelFiles
from kernels.attention import AttentionBatch, AttentionSpec, paged_attention
from kernels.dispatch import KernelSet
from kernels.rope_store import rope_store
from scheduler_proc.model_parts import Memory, load_decoder, make_memory
from scheduler_proc.numerics import Numerics
from scheduler_proc.parallel.group import Alone
from scheduler_proc.worker.forward import EagerForward
from scheduler_proc.worker.model_runner import ModelRunner
from scheduler_proc.worker.rehearsal import CONTEXT, Rehearsal
from scheduler_proc.worker.warm_up import WarmUp
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import cpu_kernels
from tests.unit.weights.files import hf_files
from tests.unit.worker.steps import Again


class Bounds:
    """Operations that see to it that a step stays where it may be."""

    def __init__(self) -> None:
        self.longest = 0
        self.max_len = self.num_pages = 0

    def kernels(self) -> KernelSet:
        return replace(cpu_kernels(), rope_store=self.rope_store, paged_attention=self.paged_attention)

    def rope_store(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, *rest: object) -> None:
        assert int(positions.min()) >= 0 and int(positions.max()) < self.max_len
        kv, locations = rest[1], rest[2]
        assert isinstance(kv, Tensor) and isinstance(locations, Tensor)
        assert int(locations.min()) >= 0 and int(locations.max()) < kv.shape[0] * kv.shape[2]
        rope_store(q, k, v, positions, *rest)  # type: ignore[arg-type]

    def paged_attention(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        longest = int(batch.kv_lens.max())
        assert longest <= min(self.max_len, batch.max_kv_len, batch.page_table.shape[1] * batch.page_size)
        assert int(batch.page_table.min()) >= 0 and int(batch.page_table.max()) < self.num_pages
        self.longest = max(self.longest, longest)
        return paged_attention(q, kv, batch, spec, lse)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return hf_files(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, num_hidden_layers=1))


def made(config: EngineConfig, model: ModelFiles, num_tokens: int, bounds: Bounds) -> tuple[ModelRunner, Memory]:
    numerics = Numerics(False, torch.float32, torch.float32)
    decoder = load_decoder(config, model, numerics, bounds.kernels(), torch.device("cpu"), Alone())
    memory = make_memory(config, model, decoder, num_tokens, torch.float32)
    forward = EagerForward(decoder, memory.slots, memory.pages)
    bounds.max_len, bounds.num_pages = memory.max_len, memory.num_pages
    return ModelRunner(decoder, decoder.kernels, memory.kv_pool, memory.slots, forward, "raw"), memory


CASES = [
    case
    for number, case in enumerate(
        itertools.product((8, 20, 100, 300), (1, 16, 64), (1, 3, 20), (1, 7, 64), (False, True))
    )
    if number % 5 == 0
]


@pytest.mark.parametrize(("context", "page_size", "slots", "chunk", "graphs"), CASES)
def test_no_step_leaves_its_bounds(
    model: ModelFiles, context: int, page_size: int, slots: int, chunk: int, graphs: bool
) -> None:
    options = {
        "device": "cuda",
        "page_size": page_size,
        "max_running_requests": slots,
        "chunked_prefill_size": chunk,
        "cuda_graph_max_bs": 4,
    }
    values = {"model": {"context_length": context}, "scheduler": options}
    config, bounds = msgspec.convert(values, EngineConfig), Bounds()
    runner, memory = made(config, model, 256, bounds)
    ended: list[int] = []
    warm_up = WarmUp(config, runner, memory, lambda: ended.append(1), lambda: None, False)
    warm_up.run(Again() if graphs else None)
    assert ended == [1]
    assert bounds.longest > 1
    slots_after = memory.slots
    assert not slots_after.seq_len.any() and not slots_after.page_table.any()
    assert slots_after.ended.tolist() == [False] * slots + [True]
    assert not runner.adjustments.adjusts(np.arange(slots)).any()


def test_made_up_contexts_have_all_lengths(model: ModelFiles) -> None:
    options = {"device": "cuda", "page_size": 16, "max_running_requests": 64}
    config = msgspec.convert({"model": {"context_length": 2048}, "scheduler": options}, EngineConfig)
    runner, memory = made(config, model, 4096, Bounds())
    rehearsal, lengths = Rehearsal(runner, memory.num_pages, 16, memory.max_len), memory.slots.seq_len
    for rows in (2, 24, 64):
        rehearsal.seat(rows)
        of_rows = lengths[:rows]
        assert len(of_rows.unique()) == rows and CONTEXT // 4 <= int(of_rows.min()) < int(of_rows.max()) < 2 * CONTEXT
    assert abs(float(lengths[:64].double().mean()) - CONTEXT) < 0.05 * CONTEXT
    rehearsal.seat(1)
    assert int(lengths[0]) == CONTEXT
    rehearsal.seat(5, 100)
    assert lengths[:5].tolist() == [100] * 5
