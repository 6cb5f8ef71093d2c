"""Fixtures of tests of tools."""

from __future__ import annotations

import pytest

from engine.model_files.types import ModelFiles
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import hf_files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    # Few tokens: what comes next can be learnt in seconds.
    return hf_files(write_tiny_model(tmp_path_factory.mktemp("tiny"), tokenizer=False, vocab_size=60))
