"""Root-mean-square normalisation, alone and with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in float32.

    x: `[..., dim]` of any float dtype and any strides; weight: `[dim]`. Returns a new tensor like x.
    The product with the weight happens in x's dtype, as checkpoints of the Llama line were trained.
    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMS norm in one: `(rms_norm(x + residual), x + residual)`.

    x, residual: `[num_tokens, dim]` of one dtype; weight: `[dim]`. Both results have x's dtype; an implementation
    may reuse the memory of x and residual, so the caller must not read them afterwards.
    """
    total = residual + x
    return rms_norm(total, weight, eps), total
