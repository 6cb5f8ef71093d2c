"""The offline benchmark sends the load that others measure, and tells what became of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tools import bench_offline
from tools.bench_offline import MIXED_TOKENS, mixed_load, prefix_load


def test_the_mixed_load_is_the_known_one() -> None:
    prompts, answers = mixed_load(256)
    assert (sum(len(prompt) for prompt in prompts), sum(answers)) == MIXED_TOKENS
    assert all(100 <= len(prompt) <= 1024 and prompt.max() <= 10_000 for prompt in prompts)


def test_the_prefix_load_shares_a_prefix() -> None:
    prompts, later = prefix_load(5, 0, 1), prefix_load(5, 0, 2)
    assert all(len(prompt) == 2176 for prompt in prompts)
    assert len({prompt[:2048].tobytes() for prompt in [*prompts, *later]}) == 1
    assert len({prompt[2048:].tobytes() for prompt in [*prompts, *later]}) == 10
    assert not np.array_equal(prefix_load(1, 1, 0)[0][:2048], prompts[0][:2048])


def _runs(tmp_path: Path, arguments: str) -> list[dict]:
    figures = tmp_path / "figures.json"
    bench_offline.main([*arguments.split(), "--json", str(figures)])
    return [run for engine in json.loads(figures.read_text())["engines"] for run in engine["runs"]]


def test_every_recipe_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = _runs(tmp_path, "--device cpu --dtype float32 --cpu-threads 1 --num-requests 2 --repeats 1")
    assert [run["name"] for run in runs] == ["mixed", "cold", "warm", "radix off"]
    mixed, cold, warm, off = runs
    # The second request may find what the first has computed so far.
    assert (mixed["cached_tokens"], warm["cached_tokens"], off["cached_tokens"]) == (0, 2 * 2048, 0)
    assert cold["cached_tokens"] <= 2048
    assert all(run["num_requests"] == 2 and run["steps"] >= 32 and run["seconds"] > 0 for run in runs)
    assert off["input_tokens"] == 2 * 2176 and warm["output_tokens"] == 2 * 32
    assert "the median of 1" in capsys.readouterr().out


def test_repeats_find_nothing_cached_and_retractions_are_counted(tmp_path: Path) -> None:
    arguments = "--device null --recipe mixed --num-requests 40 --repeats 2 --max-total-tokens 9000"
    runs = _runs(tmp_path, arguments)
    assert [run["cached_tokens"] for run in runs] == [0, 0]
    assert sum(run["retractions"] for run in runs) > 0
