"""Logprobs of drawn tokens and of prompts, against one forward pass and a softmax in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from scheduler_proc.plan import PromptScores, TokenScores
from scheduler_proc.worker.scores import PIECE_ROWS
from tests.unit.kernels.test_sampling import _allowed
from tests.unit.kernels.wishes import Wish, naive
from tests.unit.worker.steps import VOCAB, Occupant, Steps, logits_of, tiny_decoder

WISH = Wish(repetition=1.5, presence=1.0, frequency=0.5, bias={4: 3.0, 9: -5.0}, ends=[8, 12], min_len=9)
FILTERS = {"temperature": 0.7, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "seed": 5}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def check(scores: TokenScores, index: int, logits: np.ndarray, token: int, width: int) -> None:
    """Row `index` of `scores` says of `token` and the `width` most likely ones what `logits` say."""
    logprobs = log_softmax(logits)
    assert scores.chosen.dtype == scores.tops.dtype == np.float32 and scores.ids.dtype == np.int32
    assert scores.chosen[index] == pytest.approx(logprobs[token], abs=1e-4)
    order = np.lexsort((np.arange(len(logits)), -logits))[:width]
    tops = scores.tops[index, :width]
    np.testing.assert_allclose(tops, logprobs[order], atol=1e-4)
    np.testing.assert_allclose(logprobs[scores.ids[index, :width]], tops, atol=1e-4)
    assert len(set(scores.ids[index, :width].tolist())) == width


def processed(occupant: Occupant, row: np.ndarray, length: int) -> np.ndarray:
    """What the token at `length` was drawn from."""
    tokens = [*occupant.known, *occupant.drawn]
    if occupant.wish is not None:
        row = naive(row, replace(occupant.wish, output=tokens[len(occupant.prompt) : length]), length)
    sampling = occupant.sampling
    if not sampling.get("temperature"):
        return row
    row = row / np.float32(sampling["temperature"])
    kept = _allowed(
        torch.from_numpy(row), int(sampling.get("top_k", -1)), sampling.get("top_p", 1.0), sampling.get("min_p", 0.0)
    )
    return np.array([x if token in kept else -np.inf for token, x in enumerate(row)], np.float32)


@pytest.mark.parametrize("mode", ["raw", "processed"])
def test_scores_of_drawn_tokens(mode: str) -> None:
    """Decode rows and last chunks in one step, with and without adjustments, each with a width of its own."""
    steps = Steps(mode=mode)  # type: ignore[arg-type]
    steps.join(0, [5, 6, 7, 5], [9, 9], WISH)
    steps.join(1, [5, 6, 7], wish=WISH, **FILTERS)
    steps.join(2, [9, 4, 9], **FILTERS)
    steps.join(3, [30, 31, 32, 33])
    steps.join(4, [40, 41, 42], wish=WISH)
    steps.join(5, [60, 61, 62, 63, 64], temperature=1.3, seed=9)
    widths = {0: 3, 1: 5, 2: 0, 3: 8, 5: 2}
    plans = [
        steps.plan(chunks={0: 6, 1: 3, 4: 1}, logprobs=widths),
        steps.plan(decode=[0, 1], chunks={2: 3, 3: 4, 4: 2, 5: 2}, logprobs=widths),
        steps.plan(decode=[0, 1, 2, 3, 4], chunks={5: 3}, logprobs=widths),
        *(steps.plan(decode=range(6), logprobs=widths) for _ in range(3)),
        steps.plan(decode=[4, 2], logprobs=widths),
    ]
    results = steps.run(*plans)
    model = {slot: logits_of([*o.known, *o.drawn]) for slot, o in steps.slots.items()}
    for plan, result in zip(plans, results, strict=True):
        assert result.scores is not None
        asked = [widths.get(int(slot), -1) for slot, samples in zip(plan.rows, plan.sample, strict=True) if samples]
        assert result.scores.ids.shape == result.scores.tops.shape == (len(plan.rows), max(asked))
        for index, slot in enumerate(plan.rows.tolist()):
            if plan.sample[index] and slot in widths:
                length = int(plan.kv_lens[index])
                logits = model[slot][length - 1]
                logits = logits if mode == "raw" else processed(steps.slots[slot], logits, length)
                check(result.scores, index, logits, int(result.tokens[index, 0]), widths[slot])


def test_the_mode_and_the_wish_for_logprobs_change_no_token() -> None:
    drawn = []
    for mode, widths in (("raw", {}), ("raw", {0: 2, 1: 20}), ("processed", {0: 2, 1: 20})):
        steps = Steps(mode=mode)  # type: ignore[arg-type]
        steps.join(0, [5, 6, 7], wish=WISH)
        steps.join(1, [5, 6, 7], wish=WISH, **FILTERS)
        plans = [steps.plan(chunks={0: 3, 1: 3}, logprobs=widths)]
        plans += [steps.plan(decode=[0, 1], logprobs=widths) for _ in range(8)]
        steps.run(*plans)
        drawn.append([steps.slots[0].drawn, steps.slots[1].drawn])
    assert drawn[0] == drawn[1] == drawn[2]


def test_what_a_filter_kept_out_is_minus_infinity() -> None:
    steps = Steps(mode="processed")
    steps.join(0, [5, 6, 7], temperature=1.0, top_k=2, seed=1)
    [result] = steps.run(steps.plan(chunks={0: 3}, logprobs={0: 4}))
    assert result.scores is not None
    assert np.isfinite(result.scores.tops[0]).tolist() == [True, True, False, False]
    assert float(np.exp(result.scores.tops[0]).sum()) == pytest.approx(1.0, abs=1e-5)
    assert result.scores.chosen[0] in result.scores.tops[0]


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("width", [0, 4])
def test_scores_of_a_prompt(chunk: int, width: int) -> None:
    """Chunks of any size, longer than a piece too, in steps where nobody samples and beside rows that decode."""
    prompt = np.random.default_rng(0).integers(3, VOCAB, 2 * PIECE_ROWS + 9).tolist()
    steps = Steps(mode="processed")
    steps.join(1, [20, 21, 22], **FILTERS)
    steps.run(steps.plan(chunks={1: 3}))
    steps.join(0, prompt, wish=WISH, **FILTERS)
    model = logits_of(prompt)
    position = 0
    while position < len(prompt):
        length = min(chunk, len(prompt) - position)
        plan = steps.plan([1] if position % 2 else [], {0: length}, {1: 2}, {0: width})
        [result] = steps.run(plan)
        targets = prompt[position + 1 : position + length + 1]
        assert len(result.prompt_scores) == len(plan.prompt_scores) == bool(targets)
        if targets:
            scores = result.prompt_scores[0]
            assert scores.ids.shape == scores.tops.shape == (len(targets), width)
            for index, target in enumerate(targets):
                check(scores, index, model[position + index], target, width)
        position += length
    assert result.failed is None and len(steps.slots[0].drawn) == 1


def test_prompts_from_an_offset_and_in_the_plans_order() -> None:
    prompts = {0: [5, 6, 7, 8, 9, 10], 1: [30, 31, 32, 33]}
    steps = Steps()
    for slot, prompt in prompts.items():
        steps.join(slot, prompt)
    plan = steps.plan(chunks={0: 6, 1: 4}, prompt_widths={0: 2, 1: 5})
    first, second = plan.prompt_scores
    plan.prompt_scores = (second, PromptScores(first.row, 3, first.targets[3:], first.width))
    [result] = steps.run(plan)
    assert [scores.ids.shape for scores in result.prompt_scores] == [(3, 5), (2, 2)]
    for index in range(3):
        check(result.prompt_scores[0], index, logits_of(prompts[1])[index], prompts[1][index + 1], 5)
    for index in range(2):
        check(result.prompt_scores[1], index, logits_of(prompts[0])[3 + index], prompts[0][4 + index], 2)


def test_a_nan_in_a_prompt_fails_its_row() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7, 8, 9, 10])
    steps.join(1, [5, 6, 7, 8, 9, 10])
    steps.run(steps.plan(chunks={0: 2, 1: 2}))
    page = steps.runner.slots.page_table[1, 0]
    steps.runner.kv_pool.layers[1][page] = torch.nan
    [nobody_samples] = steps.run(steps.plan(chunks={0: 2, 1: 2}, prompt_widths={0: 1, 1: 1}))
    assert nobody_samples.failed is not None and nobody_samples.failed.tolist() == [False, True]
    check(nobody_samples.prompt_scores[0], 0, logits_of([5, 6, 7])[2], 8, 1)
    [both_sample] = steps.run(steps.plan(chunks={0: 2, 1: 2}, prompt_widths={0: 1}, logprobs={0: 2, 1: 2}))
    assert both_sample.failed is not None and both_sample.failed.tolist() == [False, True]


def test_more_alternatives_than_there_are_tokens() -> None:
    steps = Steps()
    steps.join(0, [5, 6, 7])
    [result] = steps.run(steps.plan(chunks={0: 3}, logprobs={0: VOCAB + 5}, prompt_widths={0: VOCAB + 1}))
    assert result.scores is not None and result.scores.ids.shape == (1, VOCAB + 5)
    assert sorted(result.scores.ids[0, :VOCAB].tolist()) == list(range(VOCAB))
    assert np.isneginf(result.scores.tops[0, VOCAB:]).all()
    assert np.isneginf(result.prompt_scores[0].tops[:, VOCAB:]).all()


def test_a_long_prompts_scores_are_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    decoder = tiny_decoder()
    monkeypatch.setattr(decoder, "on_layer", lambda: calls.append(None))
    counts = []
    for widths in ({}, {0: 0}):
        calls.clear()
        steps = Steps()
        steps.join(0, list(range(3, 3 + 2 * PIECE_ROWS)))
        steps.run(steps.plan(chunks={0: 2 * PIECE_ROWS}, prompt_widths=widths))
        counts.append(len(calls))
    assert counts[1] == counts[0] + 2
