"""The step benchmark runs and reports what it was asked for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from tools import bench_steps


def test_it_prints_a_row_for_each_batch_and_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    arguments = f"--model {model} --batch 1 3 --context 5 300 --steps 3 --cpu-threads 1"
    monkeypatch.setattr(sys, "argv", ["bench_steps", *arguments.split()])
    bench_steps.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:5].strip().isdigit()]
    assert [(row[0], row[1]) for row in rows] == [("1", "5"), ("1", "300"), ("3", "5"), ("3", "300")]
