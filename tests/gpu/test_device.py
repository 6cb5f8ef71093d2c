"""The invariance matrix on the device: text and logprobs do not depend on how a request is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scheduler_proc.common_prefix import common_lens
from tests.support.device_matrix import (
    FAMILIES,
    Judge,
    Run,
    TinyModel,
    assert_identical,
    carry_out,
    configured,
    greedy_cases,
    pairwise,
    sampling_cases,
    tiny_model,
)
from tests.support.matrix import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

DEVICE = "cuda"
LENGTHS = [1, 5, 16, 17, 40, 64, 65, 90]
TOKENS = 40
RUNS = pairwise()
CROWDED = Run(company=True, chunk=64, cache="cold", depth=2, graphs=True, small_pool=True)
SAMPLING_RUNS = pairwise({"company": (False, True), "depth": (0, 1, 2), "graphs": (False, True)})
MEAN_DIVERGENCE, MOST_DIVERGENCE = 1e-3, 1e-2
"""Of a token's distribution. Models with random weights round more than trained ones: their residuals do not grow."""


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def judge(model: TinyModel) -> Judge:
    return Judge(model)


@pytest.fixture(scope="module")
def made() -> list[Case]:
    return greedy_cases(400, LENGTHS, TOKENS)


@pytest.mark.parametrize("run", [*RUNS, CROWDED], ids=str)
def test_close_to_float32(model: TinyModel, judge: Judge, made: list[Case], run: Run, tmp_path: Path) -> None:
    outcome = carry_out(tmp_path, configured(DEVICE, run), model, made, run)
    verdict = judge.greedy(str(run), made, outcome.answers)
    mean = sum(verdict.divergences) / len(verdict.divergences)
    most = max(verdict.divergences)
    print(f"{run}: divergence {mean:.1e}, most {most:.1e}; {verdict.num_ties} near ties")
    assert len(verdict.divergences) == len(LENGTHS) * TOKENS
    assert mean < MEAN_DIVERGENCE and most < MOST_DIVERGENCE
    assert outcome.num_retractions > 0 or run != CROWDED


@pytest.mark.parametrize("depth", [0, 2])
def test_rows_with_a_common_prefix(
    model: TinyModel, judge: Judge, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has found to be common it goes through once, also beside others and when rows end."""
    monkeypatch.setattr("scheduler_proc.build.LEAST_SAVED", 1)
    told = []

    def finding(*arguments: Any) -> np.ndarray | None:
        told.append(common_lens(*arguments))
        return told[-1]

    monkeypatch.setattr("scheduler_proc.planner.common_lens", finding)
    (shared,) = greedy_cases(400, [50], 1, seed=7)
    own = greedy_cases(400, [1 + 3 * index for index in range(18)], 1, seed=8)
    made = [Case([*shared.prompt, *case.prompt], 12 + index) for index, case in enumerate(own)]
    made += greedy_cases(400, [20, 70], TOKENS, seed=9)
    run = Run(company=True, cache="warm", depth=depth, graphs=True)
    config = configured(DEVICE, run, cuda_graph_max_bs=24, max_running_requests=24)
    outcome = carry_out(tmp_path, config, model, made, run)
    verdict = judge.greedy("in common", made, outcome.answers)
    assert sum(verdict.divergences) / len(verdict.divergences) < MEAN_DIVERGENCE
    assert max(int((lens > 0).sum()) for lens in told if lens is not None) >= 8


def test_deterministic_to_the_bit(model: TinyModel, judge: Judge, made: list[Case], tmp_path: Path) -> None:
    first = None
    for run in [*RUNS, CROWDED]:
        config = configured(DEVICE, run, deterministic=True)
        answers = carry_out(tmp_path, config, model, made, run).answers
        if first is None:
            first = answers
            judge.greedy("deterministic", made, answers)
        assert_identical(str(run), first, answers)


def test_sampling_does_not_depend_on_the_run(model: TinyModel, tmp_path: Path) -> None:
    made = sampling_cases(400, LENGTHS, TOKENS)
    first = None
    for run in SAMPLING_RUNS:
        config = configured(DEVICE, run, deterministic=True)
        answers = carry_out(tmp_path, config, model, made, run).answers
        first = first or answers
        assert_identical(str(run), first, answers)
    assert first is not None
    plain = [Case(case.prompt, case.max_tokens) for case in made]
    config = configured(DEVICE, Run(), deterministic=True)
    greedy = carry_out(tmp_path, config, model, plain, Run()).answers
    for case, answer, without in zip(made, first, greedy, strict=True):
        stops = case.sampling.get("stop_token_ids", ())
        assert not set(answer.tokens[: case.sampling.get("min_tokens", 0)]) & set(stops)
        assert len(answer.tokens) == TOKENS or answer.tokens[-1] in stops
        assert case.sampling.keys() <= {"min_tokens", "stop_token_ids"} or answer.tokens != without.tokens
