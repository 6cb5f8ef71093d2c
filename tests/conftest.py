"""Where there is no CUDA device, Triton's kernels are interpreted.

Triton decides when a kernel is defined, so this must come before any module of kernels.cuda is imported.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
