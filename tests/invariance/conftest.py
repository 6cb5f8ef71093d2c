"""What the invariance tests run on."""

from __future__ import annotations

import pytest

from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from tests.support.matrix import LENGTHS, TOKENS, Case, Reference, cases, references
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return resolve(str(write_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3", num_hidden_layers=2)))


@pytest.fixture(scope="module")
def made(tiny: ModelFiles) -> list[Case]:
    """The requests; a file may have its own."""
    return cases(tiny.config.vocab_size, LENGTHS, TOKENS)


@pytest.fixture(scope="module")
def alone(tiny: ModelFiles, made: list[Case], tmp_path_factory: pytest.TempPathFactory) -> list[Reference]:
    """What each of them answers where nothing else runs."""
    return references(tmp_path_factory.mktemp("alone"), tiny, made)
