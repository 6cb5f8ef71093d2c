"""The gate of a gated MLP."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`, where gate and up are the halves of the last dimension.

    gate_up: `[num_tokens, 2 * inner]`; returns `[num_tokens, inner]` of the same dtype.
    Source: Shazeer, "GLU Variants Improve Transformer", 2020 (SwiGLU).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` with the exact GELU; shapes as in silu_and_mul. Source: Hendrycks and Gimpel, 2016."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """`gelu(gate) * up` with the tanh approximation of GELU (Gemma); shapes as in silu_and_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
