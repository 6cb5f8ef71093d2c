"""Answers with drafts on the device: those without them, and the same memory from step to step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.config import ModelOptions, SpeculativeOptions
from scheduler_proc.speculative import corpus
from tests.support.device_matrix import FAMILIES, Run, TinyModel, answers_of, assert_scored, configured, tiny_model
from tests.support.dflash_drafters import write_drafter
from tests.support.eagle_heads import write_eagle_head, write_head
from tests.support.matrix import Case, Reference, assert_same, cases, references
from tests.support.scheduler import Harness
from tests.support.tiny_models import tiny_config, write_tiny_model

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


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What drafts, by the algorithm that needs it: nearly the model itself, for one."""
    config = tiny_config(**FAMILIES["llama"][1])
    heads = {
        kind: str(write(tmp_path_factory.mktemp(kind), config, head_dim=64))
        for kind, write in (("EAGLE", write_eagle_head), ("EAGLE3", write_head), ("DFLASH", write_drafter))
    }
    same = write_tiny_model(tmp_path_factory.mktemp("same"), **FAMILIES["llama"][1])
    return {"STANDALONE": str(same), **heads}


NGRAM = SpeculativeOptions(
    speculative_algorithm="NGRAM",
    speculative_num_draft_tokens=5,
    speculative_adaptive=False,
    speculative_ngram_min_match_window_size=1,
)


def harness_of(
    folder: Path, model: TinyModel, run: Run, speculative: SpeculativeOptions = NGRAM, **options: Any
) -> Harness:
    config = configured("cuda", run, cuda_graph_max_bs=8, model=FLOAT32, **options)
    return Harness.of_model(folder, msgspec.structs.replace(config, speculative=speculative), model.files)


def drafting_with(algorithm: str, drafters: dict[str, str], top_k: int) -> SpeculativeOptions:
    return SpeculativeOptions(
        speculative_algorithm=algorithm,
        speculative_draft_model_path=drafters[algorithm],
        speculative_num_steps=3,
        speculative_eagle_topk=top_k,
        speculative_num_draft_tokens=4 if top_k == 1 else 7,
        speculative_dflash_block_size=2 + top_k,
        speculative_adaptive=False,
    )


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
    assert_answers(harness, str(run), made, alone)


@pytest.mark.parametrize(("depth", "graphs", "small_pool"), [(0, False, False), (1, True, False), (2, True, True)])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "DFLASH", "STANDALONE"])
def test_answers_with_a_model_that_drafts(
    model: TinyModel,
    made: list[Case],
    alone: list[Reference],
    drafters: dict[str, str],
    tmp_path: Path,
    algorithm: str,
    top_k: int,
    depth: int,
    graphs: bool,
    small_pool: bool,
) -> None:
    run = Run(company=True, chunk=64, cache="cold", page_size=16, depth=depth, graphs=graphs, small_pool=small_pool)
    harness = harness_of(tmp_path, model, run, drafting_with(algorithm, drafters, top_k))
    assert_answers(harness, f"{algorithm} {top_k} {run}", made, alone)
    assert algorithm != "STANDALONE" or harness.workload.num_accepted > 100


@pytest.mark.parametrize(("depth", "graphs"), [(0, False), (1, True), (2, True)])
@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_logprobs(
    model: TinyModel,
    made: list[Case],
    drafters: dict[str, str],
    tmp_path: Path,
    mode: str,
    top_k: int,
    depth: int,
    graphs: bool,
) -> None:
    """Of every token, those without drafts; every second request wants them."""
    run = Run(company=True, chunk=64, cache="cold", page_size=16, depth=depth, graphs=graphs)
    numbers = range(1, len(made) + 1, 2)
    found = []
    for speculative in (SpeculativeOptions(), drafting_with("STANDALONE", drafters, top_k)):
        harness = harness_of(tmp_path, model, run, speculative, logprobs_mode=mode)
        try:
            for number, case in enumerate(made, start=1):
                logprobs = number if number in numbers else -1
                harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling, logprobs=logprobs)
            harness.run()
        finally:
            harness.device.close()
        found.append(answers_of(harness, numbers))
    assert harness.workload.num_accepted > 100
    for expected, got in zip(*found, strict=True):
        assert len(got.tokens) == TOKENS
        assert_scored(expected, got, 1e-3)


@pytest.mark.parametrize(("depth", "graphs", "small_pool"), [(0, False, False), (1, True, False), (2, True, True)])
@pytest.mark.parametrize("breadth", [1, 4])
def test_answers_with_branches_and_a_corpus(
    model: TinyModel,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    breadth: int,
    depth: int,
    graphs: bool,
    small_pool: bool,
) -> None:
    answered = [token for case, one in zip(made, alone, strict=True) for token in (*case.prompt, *one.tokens)]
    # The tiny model has no tokenizer.
    monkeypatch.setattr(corpus, "read_corpus", lambda path, model: np.array(answered, np.int32))
    path = tmp_path / "corpus.txt"
    path.write_text("text")
    speculative = msgspec.structs.replace(
        NGRAM,
        speculative_num_draft_tokens=8,
        speculative_ngram_max_bfs_breadth=breadth,
        speculative_ngram_external_corpus_path=str(path),
    )
    run = Run(company=True, chunk=64, cache="cold", page_size=16, depth=depth, graphs=graphs, small_pool=small_pool)
    harness = harness_of(tmp_path, model, run, speculative)
    assert_answers(harness, f"{breadth} {run}", made, alone)
    assert harness.workload.num_accepted > 50


def assert_answers(harness: Harness, label: str, made: list[Case], alone: list[Reference]) -> None:
    """Those without drafts, and there were drafts."""
    try:
        for number, case in enumerate(made, start=1):
            harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
            harness.turn()
        harness.run()
        assert not harness.errors
    finally:
        harness.device.close()
    assert_same(label, alone, [harness.tokens[number] for number in range(1, len(made) + 1)])
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
