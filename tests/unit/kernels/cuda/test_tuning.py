"""The tuner: what is chosen, when it is measured, and which files are believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cuda.tuning import Tuner

CPU = torch.device("cpu")


class Clock:
    """A timer by which a call takes as long as it returns; counts what it measured."""

    def __init__(self) -> None:
        self.measured = 0

    def __call__(self, call: Callable[[], object]) -> float:
        self.measured += 1
        seconds = call()
        assert isinstance(seconds, float)
        return seconds


def _broken() -> float:
    raise RuntimeError("cannot")


CANDIDATES: dict[str, Callable[[], object]] = {"slow": lambda: 3.0, "fast": lambda: 1.0, "broken": _broken}


def test_frozen_it_measures_nothing(tmp_path: Path) -> None:
    clock = Clock()
    tuner = Tuner(CPU, tmp_path / "kept", clock)
    assert tuner.choose("op", (1,), CANDIDATES, "slow") == "fast"
    tuner.freeze()
    assert [tuner.choose("op", (key,), CANDIDATES, "slow") for key in (1, 2, 2)] == ["fast", "slow", "slow"]
    assert tuner.known("op", (2,)) == "slow"
    assert clock.measured == 3
    tuner.thaw()
    # What was answered without a measurement is measured now.
    assert tuner.known("op", (2,)) is None
    assert [tuner.choose("op", (key,), CANDIDATES, "slow") for key in (1, 2)] == ["fast", "fast"]
    assert clock.measured == 6
    tuner.freeze()
    other = Tuner(CPU, tmp_path / "kept", clock)
    other.freeze()
    assert other.choose("op", (2,), CANDIDATES, "slow") == "fast"


def test_fastest_is_measured_once_and_kept(tmp_path: Path) -> None:
    clock = Clock()
    tuner = Tuner(CPU, tmp_path / "kept", clock)
    assert [tuner.choose("op", (1, "bf16"), CANDIDATES, "slow") for _ in range(3)] == ["fast"] * 3
    assert clock.measured == 3
    again = Clock()
    other = Tuner(CPU, tmp_path / "kept", again)
    assert other.choose("op", (1, "bf16"), CANDIDATES, "slow") == "fast"
    assert again.measured == 0
    assert other.choose("op", (2, "bf16"), CANDIDATES, "slow") == "fast"
    assert again.measured == 3
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o700


def test_without_a_timer_the_default(tmp_path: Path) -> None:
    tuner = Tuner(CPU, tmp_path)
    assert tuner.choose("op", (), CANDIDATES, "slow") == "slow"
    assert not list(tmp_path.iterdir())


def test_what_is_kept_serves_without_a_timer(tmp_path: Path) -> None:
    Tuner(CPU, tmp_path / "kept", Clock()).choose("op", (), CANDIDATES, "slow")
    assert Tuner(CPU, tmp_path / "kept").choose("op", (), CANDIDATES, "slow") == "fast"


def test_all_broken_gives_the_default() -> None:
    clock = Clock()
    tuner = Tuner(CPU, None, clock)
    for _ in range(3):
        assert tuner.choose("op", (), {"a": _broken, "b": _broken}, "a") == "a"
    assert clock.measured == 2


def test_a_single_candidate_is_not_measured() -> None:
    clock = Clock()
    assert Tuner(CPU, None, clock).choose("op", (), {"only": _broken}, "only") == "only"
    assert clock.measured == 0


def test_new_candidates_are_measured(tmp_path: Path) -> None:
    Tuner(CPU, tmp_path / "kept", Clock()).choose("op", (), CANDIDATES, "slow")
    faster = {**CANDIDATES, "fastest": lambda: 0.5}
    assert Tuner(CPU, tmp_path / "kept", Clock()).choose("op", (), faster, "slow") == "fastest"


def test_a_name_that_is_gone_is_not_taken(tmp_path: Path) -> None:
    tuner = Tuner(CPU, None, Clock())
    tuner.choose("op", (), CANDIDATES, "slow")
    fewer = {name: call for name, call in CANDIDATES.items() if name != "fast"}
    assert tuner.choose("op", (), fewer, "broken") == "slow"


@pytest.mark.parametrize("content", ["", "[1]", '{"op": 1}', "{", "\xff"])
def test_a_broken_file_is_replaced(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "kept"
    Tuner(CPU, directory, Clock()).choose("op", (), CANDIDATES, "slow")
    (file,) = directory.iterdir()
    file.write_text(content, encoding="latin-1")
    assert Tuner(CPU, directory, Clock()).choose("op", (), CANDIDATES, "slow") == "fast"
    assert "choices_unreadable" in caplog.text
    assert list(json.loads(file.read_bytes()).values()) == ["fast"]


def test_a_directory_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    clock = Clock()
    assert Tuner(CPU, tmp_path, clock).choose("op", (), CANDIDATES, "slow") == "fast"
    assert clock.measured == 3
    assert not list(tmp_path.iterdir())
    assert "another user can write to it" in caplog.text


def test_a_directory_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert Tuner(CPU, tmp_path / "file" / "kept", Clock()).choose("op", (), CANDIDATES, "slow") == "fast"
    assert "choices_not_kept" in caplog.text
