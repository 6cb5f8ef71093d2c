"""Answers with drafts on the device: those without them, and the same memory from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import ModelOptions, SpeculativeOptions
from tests.support.device_matrix import Run, TinyModel, configured, tiny_model
from tests.support.matrix import Case, Reference, assert_same, cases, references
from tests.support.scheduler import Harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

LENGTHS = [1, 5, 16, 17, 40, 64, 65, 90]
TOKENS = 48
FLOAT32 = ModelOptions(dtype="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def made() -> list[Case]:
    return cases(400, LENGTHS, TOKENS)


@pytest.fixture(scope="module")
def alone(model: TinyModel, made: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    return references(tmp_path_factory.mktemp("alone"), model.files, made, options=FLOAT32)


def harness_of(folder: Path, model: TinyModel, run: Run, **options: Any) -> Harness:
    speculative = SpeculativeOptions(
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=5,
        speculative_adaptive=False,
        speculative_ngram_min_match_window_size=1,
    )
    config = configured("cuda", run, model=FLOAT32, cuda_graph_max_bs=8, **options)
    return Harness.of_model(folder, msgspec.structs.replace(config, speculative=speculative), model.files)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("small_pool", [False, True])
def test_answers(
    model: TinyModel,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    depth: int,
    graphs: bool,
    small_pool: bool,
) -> None:
    run = Run(company=True, chunk=64, cache="cold", page_size=16, depth=depth, graphs=graphs, small_pool=small_pool)
    harness = harness_of(tmp_path, model, run)
    try:
        for number, case in enumerate(made, start=1):
            harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
            harness.turn()
        harness.run()
        assert not harness.errors
    finally:
        harness.device.close()
    assert_same(str(run), alone, [harness.tokens[number] for number in range(1, len(made) + 1)])
    assert harness.workload.num_verified > 0


def test_steady_steps_take_no_memory(model: TinyModel, made: list[Case], tmp_path: Path) -> None:
    run = Run(company=True, page_size=16, depth=1, graphs=True)
    harness = harness_of(tmp_path, model, run, max_total_tokens=8192)
    try:
        for number, case in enumerate(made, start=1):
            harness.add(number, case.prompt, max_tokens=150)
        harness.turn(30)
        before = torch.cuda.memory_stats()["segment.all.allocated"]
        harness.turn(60)
        assert torch.cuda.memory_stats()["segment.all.allocated"] == before
        harness.run()
    finally:
        harness.device.close()
