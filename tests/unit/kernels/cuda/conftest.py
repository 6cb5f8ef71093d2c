"""The CUDA kernels' tests run on a CUDA device if there is one, else by Triton's interpreter on the CPU.

Triton decides when a kernel is defined, so this must come before any module of kernels.cuda is imported; pytest imports
a folder's conftest first.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run: shapes must be tiny where it is the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
