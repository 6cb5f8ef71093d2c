"""The null device's made-up logprobs: shapes, order, and nothing where nothing is asked."""

from __future__ import annotations

import numpy as np

from scheduler_proc.plan import PromptScores, StepPlan, StepResult
from scheduler_proc.worker.null import NullDevice

VOCAB = 50


def run(logprobs: list[int] | None, *prompts: PromptScores) -> StepResult:
    """Two decode rows of lengths 8 and 13, and a chunk of 4 tokens after 5."""
    plan = StepPlan(
        step=1,
        rows=np.array([0, 1, 2], np.int32),
        num_decode=2,
        q_lens=np.array([1, 1, 4], np.int32),
        kv_lens=np.array([8, 13, 9], np.int32),
        tokens=np.arange(4, dtype=np.int32),
        sample=np.ones(3, bool),
        all_greedy=True,
        needs_filter=False,
        rows_version=1,
        slots_version=-1,
        joins=None,
        pages=(None,),
        logprobs=None if logprobs is None else np.array(logprobs, np.int32),
        prompt_scores=prompts,
    )
    device = NullDevice(VOCAB)
    return device.collect(device.launch(plan))


def test_nothing_is_said_unasked() -> None:
    result = run(None)
    assert result.scores is None and result.prompt_scores == ()


def test_scores_of_tokens() -> None:
    result = run([2, -1, 3])
    scores = result.scores
    assert scores is not None
    assert (scores.chosen.dtype, scores.ids.dtype, scores.tops.dtype) == (np.float32, np.int32, np.float32)
    assert scores.chosen.tolist() == [-1.0, -6.0, -2.0]
    assert scores.ids.shape == scores.tops.shape == (3, 3)
    assert scores.ids[:, 0].tolist() == result.tokens[:, 0].tolist()
    assert scores.tops[0].tolist() == [-1.0, -2.0, -3.0]
    assert scores.ids.max() < VOCAB


def test_a_width_of_0_has_no_alternatives() -> None:
    scores = run([0, -1, -1]).scores
    assert scores is not None and scores.ids.shape == scores.tops.shape == (3, 0)


def test_a_prompt_scores_the_same_in_any_chunks() -> None:
    targets = np.array([49, 7, 8], np.int32)
    [whole] = run(None, PromptScores(2, 1, targets, 2)).prompt_scores
    assert whole.chosen.tolist() == [-0.0, -1.0, -2.0]
    assert whole.ids.tolist() == [[49, 0], [7, 8], [8, 9]]
    first, rest = run(None, PromptScores(2, 1, targets[:1], 2), PromptScores(2, 2, targets[1:], 2)).prompt_scores
    assert np.array_equal(np.concatenate([first.chosen, rest.chosen]), whole.chosen)
    assert np.array_equal(np.concatenate([first.tops, rest.tops]), whole.tops)
