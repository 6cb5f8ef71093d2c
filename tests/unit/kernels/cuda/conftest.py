"""The CUDA kernels' tests run on a CUDA device if there is one, else by Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: shapes must be tiny where it is the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
