"""A drafting model changes no answer; the model itself as its own drafter is always right."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig, ModelOptions
from engine.errors import ConfigError
from engine.model_files.types import ModelFiles
from scheduler_proc.worker.program_forward import ProgramForward
from tests.invariance.test_speculative import halved, runner_of
from tests.support.matrix import TOKENS, Case, Reference, assert_same, drafting_with, references, run_together
from tests.support.packed import needs_kernels
from tests.support.scheduler import Harness
from tests.support.tiny_models import write_tiny_model


def drafting(drafter: str, top_k: int, **options: object) -> EngineConfig:
    return drafting_with("STANDALONE", drafter, top_k, **options)


@pytest.mark.parametrize(("device", "depth", "page_size", "chunk", "top_k"), halved(("cpu", "delayed"), 2))
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
    top_k: int,
) -> None:
    options = drafting(
        tiny.name, top_k, device=device, overlap_depth=depth, page_size=page_size, chunked_prefill_size=chunk
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    assert_same(f"{device} {depth} {page_size} {chunk}", alone, run_together(harness, made, stagger=1))
    workload = harness.workload
    # Some of the requests draw at random, or change their logits, which the drafter does not.
    assert workload.num_accepted > (3 if chunk == 7 else 0.2 * TOKENS * len(made))


@needs_kernels
@pytest.mark.parametrize("top_k", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_packed_weights_leave_no_bit_to_chance(tiny: ModelFiles, made: list[Case], tmp_path: Path, top_k: int) -> None:
    """Both models' passes are recorded; a model that drafts for itself is right wherever that is greedy."""
    packed = ModelOptions(quantization="int8")
    alone = references(tmp_path, tiny, made, options=packed)
    harness = Harness.of_model(
        tmp_path, drafting(tiny.name, top_k, model=packed, page_size=7, chunked_prefill_size=64), tiny
    )
    assert isinstance(runner_of(harness).forward, ProgramForward)
    assert run_together(harness, made, stagger=1) == [reference.tokens for reference in alone]
    assert harness.workload.num_accepted > 0.2 * TOKENS * len(made)


@pytest.mark.parametrize("cache", ["warm", "retracted"])
def test_it_is_right_whatever_went_before(tiny: ModelFiles, made: list[Case], tmp_path: Path, cache: str) -> None:
    """Pages from the prefix tree hold the drafter's keys and values, too."""
    more: dict = {} if cache == "warm" else {"max_total_tokens": 128, "schedule_conservativeness": 0.01}
    greedy = [Case(case.prompt, TOKENS) for case in made]
    harness = Harness.of_model(tmp_path, drafting(tiny.name, 1, page_size=2, **more), tiny)
    for round_ in range(2):
        workload = harness.workload
        workload.num_verified = workload.num_accepted = 0
        for number, case in enumerate(greedy, start=100 * round_ + 1):
            harness.add(number, case.prompt, max_tokens=case.max_tokens)
        harness.run()
        # Three drafts a step, all right but where the answer ends; the first token comes with the prompt.
        assert (workload.num_verified + workload.num_accepted) / workload.num_verified > 3.6
    assert cache == "warm" or harness.planner.num_retractions > 0
    assert cache != "warm" or sum(harness.cached.values()) > 200


def test_another_vocabulary_is_refused(tiny: ModelFiles, tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "other", tokenizer=True, vocab_size=tiny.config.vocab_size + 8)
    with pytest.raises(ConfigError, match="both must be of one tokenizer"):
        Harness.of_model(tmp_path, drafting(str(tmp_path / "other"), 1), tiny)
