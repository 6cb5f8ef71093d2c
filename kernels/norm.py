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


def rms_norm_quantised(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rms_norm` in 8 bits with a scale for each row: `(codes, scales)`, the norm being about `codes * scales`.

    x: `[num_tokens, dim]`; dtype: torch.int8 or an 8-bit float. Returns codes `[num_tokens, dim]` and float32
    `[num_tokens, 1]`: a row's largest magnitude over the type's largest number (1 for a row of zeros). Codes are
    rounded to nearest, ties to even.
    """
    return quantised(rms_norm(x, weight, eps), dtype)


def add_rms_norm_quantised(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_rms_norm` with the norm as in `rms_norm_quantised`: `(codes, scales, x + residual)`."""
    normed, total = add_rms_norm(x, residual, weight, eps)
    return *quantised(normed, dtype), total


def quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows in 8 bits, with a scale each; see `rms_norm_quantised`."""
    largest = torch.iinfo(dtype).max if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).div_(largest)
    scales = torch.where(scales == 0, 1.0, scales)
    codes = wide.div_(scales)
    if dtype == torch.int8:
        codes = codes.round_()
    return codes.clamp_(-largest, largest).to(dtype), scales
