"""What the invariance tests run on."""

from __future__ import annotations

import pytest

from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=2)))
