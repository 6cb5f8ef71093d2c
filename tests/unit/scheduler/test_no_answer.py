"""max_tokens 0: the prompt is computed and cached, nothing is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.ipc.messages import Finish
from tests.support.scheduler import Harness


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_prompt_without_answer_ends_by_length_and_is_cached(tmp_path: Path, depth: int) -> None:
    harness = Harness(tmp_path, depth=depth)
    harness.add(9, 20, max_tokens=60)
    harness.turn(3)
    harness.add(1, 150, max_tokens=0)
    harness.add(2, [5], max_tokens=0, stop=("x",))
    harness.run()
    assert harness.finish[1] == harness.finish[2] == Finish.LENGTH
    assert harness.tokens.get(1, []) == harness.tokens.get(2, []) == []
    assert harness.cached[1] == 16
    harness.add(3, 150, max_tokens=4)
    harness.run()
    assert harness.cached[3] == 144
    assert len(harness.tokens[9]) == 60


def test_a_default_limit_yields_to_what_fits_and_an_asked_one_is_refused(tmp_path: Path) -> None:
    harness = Harness(tmp_path, max_len=100)
    harness.add(1, 90, max_tokens=50, may_shorten=True)
    harness.add(2, 90, max_tokens=50)
    harness.add(3, 90, max_tokens=50, min_tokens=20, may_shorten=True)
    harness.run()
    assert len(harness.tokens[1]) == 10
    assert set(harness.errors) == {2, 3}
