"""What the modules that learn have in common."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def random_matrix(out_dim: int, in_dim: int, generator: torch.Generator) -> nn.Parameter:
    """[out_dim, in_dim]: outputs are about as large as inputs."""
    return nn.Parameter(torch.randn(out_dim, in_dim, generator=generator) / in_dim**0.5)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm over the last dimension, in float32."""
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps)


def rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    """x: [..., head_dim]; cos_sin: rows of scheduler_proc.layers.rotary.cos_sin_cache that broadcast to it."""
    cos, sin = cos_sin.to(x.dtype).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
