"""Prompts and arrivals: as many as asked for, of the right lengths, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from engine.bench.datasets import Dataset, Lengths, Workload, arrivals, make_asks, parse_lengths
from engine.bench.job import BenchError


def _workload(dataset: Dataset, **changes: object) -> Workload:
    whole = Workload(dataset, 20, Lengths(8, 16), Lengths(3, 5), 32, None, float("inf"), 0, True)
    return whole._replace(**changes)


def test_lengths() -> None:
    assert parse_lengths("7") == Lengths(7, 7) and parse_lengths("7:9") == Lengths(7, 9)
    for wrong in ("0", "9:7", "a", ""):
        with pytest.raises(ValueError):
            parse_lengths(wrong)


def test_random_ids() -> None:
    asks = make_asks(_workload("random-ids"))
    assert asks == make_asks(_workload("random-ids")) != make_asks(_workload("random-ids", seed=1))
    prompts = [request.prompt for request in asks if isinstance(request.prompt, list)]
    assert len(prompts) == 20 and {len(prompt) for prompt in prompts} <= set(range(8, 17))
    assert all(0 <= token < 10_000 for prompt in prompts for token in prompt)
    assert {request.output_len for request in asks} == {3, 4, 5}
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 20


def test_random_words() -> None:
    asks = make_asks(_workload("random"))
    assert {len(str(request.prompt).split()) for request in asks} <= set(range(8, 17))


@pytest.mark.parametrize("ids", [True, False])
def test_a_shared_prefix(ids: bool) -> None:
    workload = _workload("shared-prefix", ids=ids, input_lens=Lengths(8, 8))
    prompts = [request.prompt for request in make_asks(workload)]
    split = [prompt if isinstance(prompt, list) else prompt.split() for prompt in prompts]
    assert {len(prompt) for prompt in split} == {40}
    assert len({tuple(prompt[:32]) for prompt in split}) == 1
    assert len({tuple(prompt[32:]) for prompt in split}) == 20
    warm = make_asks(workload, warmup=True)[0].prompt
    warm = warm if isinstance(warm, list) else warm.split()
    assert warm[:32] == split[0][:32] and warm not in split


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(np.random.default_rng(0), 20_000, 50.0)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03) and gaps.std() == pytest.approx(1 / 50, rel=0.03)
    assert arrivals(np.random.default_rng(0), 3, float("inf")) == [0, 0, 0]


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    chats = [_chat(f"question number {index} of many", "an answer " * (index + 2)) for index in range(30)]
    chats += [_chat("?", "too short a question"), _chat("long " * 2000, "fine answer, really"), {"conversations": []}]
    chats += [{"conversations": [{"from": "gpt", "value": "speaks first"}, {"from": "human", "value": "so it does"}]}]
    path.write_text(json.dumps(chats))
    asks = make_asks(_workload("sharegpt-file", path=path, output_lens=None))
    prompts = [str(request.prompt) for request in asks]
    assert len(set(prompts)) == 20 and all(prompt.startswith("question number") for prompt in prompts)
    numbers = [int(prompt.split()[2]) for prompt in prompts]
    assert [request.output_len for request in asks] == [10 * (number + 2) // 4 for number in numbers]
    fixed = make_asks(_workload("sharegpt-file", path=path, output_lens=Lengths(6, 6)))
    assert {request.output_len for request in fixed} == {6}
    with pytest.raises(BenchError, match="has 30 conversations"):
        make_asks(_workload("sharegpt-file", path=path, num_prompts=31))


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', '[{"conversations": [{}, {}]}]'])
def test_no_sharegpt(tmp_path: Path, text: str) -> None:
    path = tmp_path / "chats.json"
    path.write_text(text)
    with pytest.raises(BenchError, match="no file of ShareGPT"):
        make_asks(_workload("sharegpt-file", path=path))


def _chat(question: str, answer: str) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}
