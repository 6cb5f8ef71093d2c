"""What depends on the output so far is counted once: beside neighbours, ahead of the host, retracted, resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.model_files.types import ModelFiles
from tests.support.matrix import Case, Reference, assert_same, cases, config, references, run_together
from tests.support.scheduler import Harness

TOKENS = 30
KINDS = [
    {"frequency_penalty": 1.5},
    {"presence_penalty": 2.0, "temperature": 0.9, "seed": 4},
    {"repetition_penalty": 1.4, "min_tokens": 12, "stop_token_ids": tuple(range(3, 19))},
    {"frequency_penalty": -0.5, "presence_penalty": 0.7, "logit_bias": ((9, 1.5),)},
    {},
]


@pytest.fixture(scope="module")
def made(tiny: ModelFiles) -> list[Case]:
    plain = cases(tiny.config.vocab_size, [5, 20, 33, 12, 40, 3, 18, 25, 60, 9], TOKENS, seed=3)
    return [Case(case.prompt, TOKENS, KINDS[index % len(KINDS)]) for index, case in enumerate(plain)]


def test_the_adjustments_matter(made: list[Case], alone: list[Reference], tiny: ModelFiles, tmp_path: Path) -> None:
    plain = references(tmp_path, tiny, [Case(case.prompt, TOKENS) for case in made])
    changed = [a.tokens != b.tokens for a, b in zip(alone, plain, strict=True)]
    assert [changed[index] for index in range(len(made)) if made[index].sampling] == [True] * 8
    short = [len(r.tokens) for r, case in zip(alone, made, strict=True) if "min_tokens" in case.sampling]
    assert all(length >= 12 for length in short)


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("cpu", 2), ("delayed", 1), ("delayed", 2)])
@pytest.mark.parametrize("tokens", [8192, 160])
def test_company_and_retraction_change_nothing(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, device: str, depth: int, tokens: int
) -> None:
    options = config(device=device, overlap_depth=depth, max_total_tokens=tokens, chunked_prefill_size=16, page_size=4)
    harness = Harness.of_model(tmp_path, options, tiny)
    got = run_together(harness, made, stagger=1)
    assert_same(f"{device} {depth} {tokens}", alone, got)
    assert (harness.planner.num_retractions > 0) == (tokens == 160)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_resumed_request_counts_what_it_has_said(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], tmp_path: Path, depth: int
) -> None:
    harness = Harness.of_model(tmp_path, config(device="delayed", overlap_depth=depth), tiny)
    for number, (case, reference) in enumerate(zip(made, alone, strict=True), start=1):
        known = tuple(reference.tokens[: number % 9])
        harness.tokens[number] = list(known)
        harness.add(number, case.prompt, output=known, max_tokens=TOKENS, **case.sampling)
    harness.run()
    harness.device.close()
    assert_same("resumed", alone, [harness.tokens[number] for number in range(1, len(made) + 1)])
