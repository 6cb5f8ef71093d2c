"""Servers that several tests share; each has a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.server import Server, serve
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="session")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the null device: a context so long that a request runs as long as a test wants."""
    return write_tiny_model(tmp_path_factory.mktemp("endless"), "llama", max_position_embeddings=1_000_000)


@pytest.fixture(scope="session")
def tiny_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "tiny.log"
    with serve("--model", str(tiny_model), "--max-total-tokens", "16384", log=log) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log
