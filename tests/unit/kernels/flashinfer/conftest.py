"""FlashInfer's wrappers on a CPU, over a module that stands in for FlashInfer."""

from __future__ import annotations

import pytest
import torch

from kernels.cuda.context import Context, make_context
from kernels.cuda.tuning import Tuner
from tests.unit.kernels.flashinfer.fake import FakeFlashInfer

CPU = torch.device("cpu")


@pytest.fixture
def context() -> Context:
    return make_context(CPU, Tuner(CPU, None))


@pytest.fixture
def library() -> FakeFlashInfer:
    return FakeFlashInfer()


@pytest.fixture(autouse=True)
def small_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here writes into them."""
    monkeypatch.setattr("kernels.flashinfer.planned._WORKSPACE_BYTES", 1 << 10)
    monkeypatch.setattr("kernels.flashinfer.xqa._SCRATCH_BYTES", 1 << 10)
