"""Weights for a model without files: small, fixed and the same on every machine."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from scheduler_proc.layers.target import LoadTarget

SPREAD = 1e-3
"""Values are uniform in (-SPREAD, SPREAD)."""


def dummy_tensor(name: str, target: LoadTarget, seed: int = 0) -> Tensor:
    """The float32 host tensor of parameter `name`: ones for a norm, else drawn from (seed, name) alone."""
    if target.is_norm:
        return torch.ones(target.shape)
    generator = torch.Generator().manual_seed((seed << 32) | zlib.crc32(name.encode()))
    return torch.empty(target.shape).uniform_(-SPREAD, SPREAD, generator=generator)
