"""Logprobs through the scheduler: which rows are asked, what a resend brings, prompts once whatever happens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import Finish, Resend, StepOutput, unpack_f32, unpack_i32
from scheduler_proc.logprobs import joined, packed, since
from scheduler_proc.plan import TokenScores
from tests.support.scheduler import Harness


def scored(harness: Harness) -> dict[int, list[tuple[int, int]]]:
    """Per request: (output index, width) of every token whose logprob was reported, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    reader = type(harness._rows)()
    for output in harness.outlet.messages:
        assert isinstance(output, StepOutput)
        logprobs = dict(output.tokens.logprobs)
        for index, (number, _, first, count, _, _) in enumerate(reader.rows(output.tokens)):
            if index in logprobs:
                one = logprobs[index]
                assert len(unpack_f32(one.chosen)) == count
                assert len(unpack_i32(one.ids)) == len(unpack_f32(one.tops)) == count * one.width
                found.setdefault(number, []).extend((first + i, one.width) for i in range(count))
    return found


def prompts(harness: Harness) -> dict[int, list[tuple[int, int]]]:
    """Per request: (prompt index, id) of every prompt token that was scored, in order."""
    found: dict[int, list[tuple[int, int]]] = {}
    for output in harness.outlet.messages:
        assert isinstance(output, StepOutput)
        for prompt in output.prompts:
            ids = unpack_i32(prompt.ids).tolist()
            chosen = unpack_f32(prompt.logprobs.chosen)
            assert len(ids) == len(chosen)
            assert np.isnan(chosen[0]) == (prompt.first == 0)
            found.setdefault(prompt.request, []).extend((prompt.first + i, token) for i, token in enumerate(ids))
    return found


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_every_token_of_those_who_ask_has_its_logprob(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth)
    harness.add(1, 10, max_tokens=30, logprobs=0)
    harness.add(2, 90, max_tokens=20)
    harness.add(3, 70, max_tokens=25, logprobs=5)
    harness.turn(12)
    harness.add(4, 5, max_tokens=3, logprobs=2)
    harness.run()
    assert scored(harness) == {
        1: [(i, 0) for i in range(30)],
        3: [(i, 5) for i in range(25)],
        4: [(i, 2) for i in range(3)],
    }


def test_a_resend_brings_logprobs_again(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.add(1, 10, max_tokens=30, logprobs=1)
    harness.turn(12)
    harness.outlet.messages.clear()
    harness._read = 0
    harness.inbox.messages.append(Resend(1, 0, 4))
    harness.turn(1)
    again = scored(harness)[1]
    assert again[:4] == [(4, 1), (5, 1), (6, 1), (7, 1)]
    harness.run()


@pytest.mark.parametrize("width", [0, 3])
def test_pieces_in_one_and_what_comes_after_some_tokens(width: int) -> None:
    rng = np.random.default_rng(0)
    scores = TokenScores(
        rng.random(9, np.float32), rng.integers(0, 99, (9, 4), np.int32), rng.random((9, 4), np.float32)
    )
    pieces = [packed(scores.part(start, num, width)) for start, num in ((0, 1), (1, 4), (5, 0), (5, 4))]
    assert joined(pieces) == packed(scores.part(0, 9, width))
    for num in (0, 3, 9):
        assert since(joined(pieces), num) == packed(scores.part(num, 9 - num, width))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 1, 37, 99, 150])
def test_a_prompt_is_scored_once_whatever_is_cached(tmp_path: Path, depth: int, start: int) -> None:
    harness = Harness(tmp_path, depth=depth, step_tokens=32)
    harness.add(1, 100, max_tokens=2)
    harness.run()
    harness.add(2, 100, max_tokens=2, prompt_logprobs_from=start)
    harness.run()
    assert prompts(harness).get(2, []) == [(i, 3 + i) for i in range(start, 100)]
    # What must be scored is computed; what lies before it comes from the cache.
    assert harness.cached[2] == min(max(start - 1, 0), 99) // 16 * 16


def test_a_prompt_of_one_token_and_no_answer_is_scored(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    harness.add(1, [7], max_tokens=0, prompt_logprobs_from=0)
    harness.run()
    assert prompts(harness) == {1: [(0, 7)]}
    assert harness.finish[1] == Finish.LENGTH


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_retraction_scores_nothing_twice(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth, num_pages=12, num_slots=4, max_len=190, step_tokens=16)
    for number in range(1, 5):
        harness.add(number, [number * 50 + i for i in range(40)], max_tokens=60, logprobs=1, prompt_logprobs_from=0)
    harness.run()
    assert harness.planner.num_retractions > 0
    for number in range(1, 5):
        assert scored(harness)[number] == [(i, 1) for i in range(60)]
        assert [i for i, _ in prompts(harness)[number]] == list(range(40))
