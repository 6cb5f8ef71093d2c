"""A small slice of the devices' matrix where there is no device, and what its judgement rests on."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from engine.config import ModelOptions
from tests.support.device_matrix import (
    AXES,
    TOPS,
    Answer,
    Judge,
    Run,
    TinyModel,
    assert_identical,
    bfloat16_ulp,
    carry_out,
    configured,
    divergence,
    greedy_cases,
    pairwise,
    sampling_cases,
    tiny_model,
)
from tests.support.packed import needs_kernels

LENGTHS = [1, 17, 40, 64, 90]
TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def test_every_two_values_meet_in_few_runs() -> None:
    runs = [asdict(run) for run in pairwise()]
    assert len(runs) <= 14
    for one, other in itertools.combinations(AXES, 2):
        met = {(run[one], run[other]) for run in runs}
        assert met == set(itertools.product(AXES[one], AXES[other]))


def test_ulps() -> None:
    values = torch.tensor([1.0, 1.9, -2.0, 6.5, 0.5, 0.0])
    assert bfloat16_ulp(values)[:5].tolist() == [2**-7, 2**-7, 2**-6, 2**-5, 2**-8]


def test_divergence_counts_what_is_not_listed_as_one() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, 0.0]])
    listed = logits.log_softmax(-1)[0, :2]
    same = Answer([0], [float(listed[0])], [(0, 1)], [tuple(listed.tolist())])
    assert float(divergence(logits, same)) == pytest.approx(0, abs=1e-7)
    off = Answer([0], [0.0], [(0, 1)], [(float(listed[0]) - 0.1, float(listed[1]))])
    assert float(divergence(logits, off)) > 1e-3


def test_a_wrong_token_is_seen(model: TinyModel) -> None:
    case = greedy_cases(400, [9], 4)[0]
    judge = Judge(model)
    best = [int(judge.logits(case.prompt, [0])[0].argmax())]
    tops = judge.logits(case.prompt, best).log_softmax(-1).topk(TOPS)
    answer = Answer(best, [0.0], [tuple(tops.indices[0].tolist())], [tuple(tops.values[0].tolist())])
    assert judge.greedy("right", [case], [answer]).divergences[0] < 1e-6
    answer.tokens = [int(judge.logits(case.prompt, best)[0].argmin())]
    with pytest.raises(AssertionError, match="behind the best"):
        judge.greedy("wrong", [case], [answer])


@pytest.mark.parametrize(
    ("device", "run"),
    [
        ("cpu", Run(company=True, chunk=7, cache="cold", page_size=1)),
        ("delayed", Run(company=True, chunk=64, cache="warm", page_size=64, depth=2, small_pool=True)),
        ("delayed", Run(cache="off", depth=1)),
    ],
)
def test_a_slice(model: TinyModel, tmp_path: Path, device: str, run: Run) -> None:
    made = greedy_cases(400, LENGTHS, TOKENS)
    outcome = carry_out(tmp_path, configured(device, run), model, made, run)
    verdict = Judge(model).greedy(f"{device} {run}", made, outcome.answers)
    assert len(verdict.divergences) == len(LENGTHS) * TOKENS
    assert sum(verdict.divergences) / len(verdict.divergences) < 1e-3


@needs_kernels
def test_a_deterministic_slice(model: TinyModel, tmp_path: Path) -> None:
    made = sampling_cases(400, [5, 17, 40, 9, 30, 64, 21, 12], TOKENS)
    packed = ModelOptions(quantization="int8")
    runs = [("cpu", Run()), ("delayed", Run(company=True, chunk=7, cache="warm", page_size=1, depth=2))]
    one, other = (
        carry_out(tmp_path, configured(device, run, model=packed, deterministic=True), model, made, run)
        for device, run in runs
    )
    assert_identical("deterministic", one.answers, other.answers)
    with pytest.raises(AssertionError, match="row 0 differs at token 0"):
        assert_identical("mixed up", one.answers, [one.answers[7], *one.answers[1:]])
