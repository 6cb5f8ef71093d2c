"""Logprobs are the same with drafts as without: of every token, those of the node at which it was drawn."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.ipc.messages import Finish, Resend, unpack_u64
from engine.model_files.types import ModelFiles
from tests.invariance.test_speculative import DEVICES, Replays, drafting, knowing
from tests.support.device_matrix import Answer, answers_of, assert_scored
from tests.support.matrix import CLOSE, TOKENS, Case, Reference, cases, config
from tests.support.scheduler import Harness

MODES = ("raw", "processed")
SCORED = (1, 2, 4, 5, 6)
"""Requests that want logprobs, each its own number of them; the others are in the same steps."""
QUICK = (("cpu", 0, "chain", "raw"), ("delayed", 2, "tree", "processed"), ("delayed", 1, "ngram", "raw"))


def matrix() -> list[Any]:
    every = itertools.product(("cpu", "delayed"), (0, 1, 2), ("ngram", "tree", "chain"), MODES)
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in every]


@pytest.fixture(scope="module")
def made(tiny: ModelFiles) -> list[Case]:
    """Greedy, sampled with filters, and with penalties and biases, two of each."""
    return cases(tiny.config.vocab_size, [5, 33, 17, 40, 1, 16], TOKENS)


@pytest.fixture(scope="module")
def expected(tiny: ModelFiles, made: list[Case], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """What the requests get without drafts, by mode."""
    found = {}
    for mode in MODES:
        harness = Harness.of_model(tmp_path_factory.mktemp(mode), config(logprobs_mode=mode), tiny)
        ask(harness, made)
        harness.run()
        found[mode] = answers_of(harness, SCORED)
    return found


def ask(harness: Harness, made: list[Case], numbers: Sequence[int] = range(1, 7)) -> None:
    for number in numbers:
        case = made[number - 1]
        harness.add(number, case.prompt, max_tokens=TOKENS, **case.sampling, logprobs=wish(number))


def wish(number: int) -> int:
    return number - 1 if number in SCORED else -1


def drafting_harness(
    tmp_path: Path, tiny: ModelFiles, made: list[Case], alone: list[Reference], kind: str, **options: object
) -> Harness:
    harness = Harness.of_model(tmp_path, drafting(**options), tiny)
    if kind != "ngram":
        knowing(harness, made, alone, as_tree=kind == "tree")
    return harness


@pytest.mark.parametrize(("device", "depth", "kind", "mode"), matrix())
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    device: str,
    depth: int,
    kind: str,
    mode: str,
) -> None:
    options: dict[str, object] = {"device": device, "overlap_depth": depth, "logprobs_mode": mode}
    harness = drafting_harness(tmp_path, tiny, made, alone, kind, **options)
    ask(harness, made)
    harness.run()
    harness.device.close()
    for got, answer in zip(answers_of(harness, SCORED), expected[mode], strict=True):
        assert len(got.tokens) == TOKENS
        assert_scored(answer, got)
    assert scored_requests(harness) == set(SCORED)
    accepted = {drafted.request: drafted.accepted for output in harness.outlet.messages for drafted in output.drafted}
    assert kind == "ngram" or all(accepted[number] > 3 for number in SCORED)


@pytest.mark.parametrize(("device", "depth"), DEVICES)
def test_an_end_within_what_was_accepted_ends_the_logprobs(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    device: str,
    depth: int,
) -> None:
    """By a stop token of every second request, else by length."""
    harness = drafting_harness(tmp_path, tiny, made, alone, "chain", device=device, overlap_depth=depth)
    for number, case in enumerate(made, start=1):
        stop = {"stop_token_ids": (alone[number - 1].tokens[number + 3],)} if number % 2 else {}
        harness.add(number, case.prompt, max_tokens=number + 5, **case.sampling, **stop, logprobs=wish(number))
    harness.run()
    harness.device.close()
    for number, got, answer in zip(SCORED, answers_of(harness, SCORED), expected["raw"], strict=True):
        assert got.tokens == harness.tokens[number]
        assert harness.finish[number] == (Finish.STOP_TOKEN if number % 2 else Finish.LENGTH)
        assert_scored(answer, got)
    assert harness.workload.num_accepted > 10


@pytest.mark.parametrize("first", [0, 3, 7])
def test_a_resend_brings_those_from_there_on(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    first: int,
) -> None:
    """Wherever the steps' runs of tokens begin."""
    harness = drafting_harness(tmp_path, tiny, made, alone, "chain")
    ask(harness, made)
    while len(harness.tokens.get(4, [])) < 12:
        harness.turn()
    known = len(harness.tokens[4])
    harness.outlet.messages.clear()
    harness._read = 0
    harness.inbox.messages.append(Resend(4, 0, first))
    harness.turn()
    [got] = answers_of(harness, [4])
    assert len(got.tokens) >= known - first and got.tokens == expected["raw"][2].tokens[first:][: len(got.tokens)]
    np.testing.assert_allclose(got.chosen, expected["raw"][2].chosen[first:][: len(got.tokens)], atol=CLOSE)
    assert {len(ids) for ids in got.ids} == {3}
    harness.run()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("as_tree", [False, True])
def test_steps_as_graphs(
    tiny: ModelFiles,
    made: list[Case],
    alone: list[Reference],
    expected: dict[str, list[Answer]],
    tmp_path: Path,
    as_tree: bool,
    mode: str,
) -> None:
    """Graphs leave the logits of all nodes behind; only steps in which rows change theirs have none."""
    options: dict[str, object] = {"device": "delayed", "overlap_depth": 1, "logprobs_mode": mode}
    harness = Harness.of_model(tmp_path, drafting(4, **options), tiny)
    replays = Replays(harness, knowing(harness, made, alone, as_tree=as_tree))
    ask(harness, made, [1, 3, 4, 6])
    harness.run()
    harness.device.close()
    assert not harness.errors
    for got, number in zip(answers_of(harness, [1, 4, 6]), [1, 4, 6], strict=True):
        assert len(got.tokens) == TOKENS
        assert_scored(expected[mode][SCORED.index(number)], got)
    assert replays.num > 5 and harness.workload.num_accepted > 5


def test_retraction_scores_nothing_twice(
    tiny: ModelFiles, made: list[Case], alone: list[Reference], expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    options: dict[str, object] = {"device": "delayed", "overlap_depth": 1, "page_size": 2, "max_total_tokens": 96}
    options |= {"schedule_conservativeness": 0.01, "chunked_prefill_size": 32}
    harness = drafting_harness(tmp_path, tiny, made, alone, "tree", **options)
    ask(harness, made)
    harness.run()
    harness.device.close()
    assert harness.planner.num_retractions > 0 and harness.workload.num_accepted > 0
    for got, answer in zip(answers_of(harness, SCORED), expected["raw"], strict=True):
        assert len(got.tokens) == TOKENS
        assert_scored(answer, got)


def scored_requests(harness: Harness) -> set[int]:
    """Those whose tokens came with logprobs."""
    found = set()
    for output in harness.outlet.messages:
        requests = unpack_u64(output.tokens.requests).tolist()
        found |= {requests[row] for row, _ in output.tokens.logprobs}
    return found
