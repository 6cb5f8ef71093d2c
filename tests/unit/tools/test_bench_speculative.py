"""The benchmark of drafts, on a model that says little."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_models import write_tiny_model
from tools.bench_speculative import main


def test_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(write_tiny_model(tmp_path / "tiny"))
    options = ["--batch", "1", "3", "--num-prompts", "3", "--max-tokens", "12", "--device", "cpu", "--cpu-threads", "1"]
    paths = ["--draft-model-path", f"STANDALONE={model}"]
    main(["--model", model, *options, "--methods", "NGRAM!", "STANDALONE!", *paths, "--json", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out").read_text())["rows"]
    assert [(row["method"], row["batch"]) for row in rows] == [
        (method, batch) for method in ("none", "NGRAM!", "STANDALONE!") for batch in (1, 3)
    ]
    assert all(row["tokens_per_s"] > 0 and row["equal"] == 1.0 for row in rows)
    assert [row["drafting"] for row in rows[:2]] == [0.0, 0.0] and rows[4]["accept_len"] > 1.5
    assert "STANDALONE!" in capsys.readouterr().out


def test_a_method_that_needs_a_model(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs --speculative-draft-model-path"):
        main(["--model", str(write_tiny_model(tmp_path)), "--device", "cpu", "--methods", "EAGLE3", "--batch", "1"])
