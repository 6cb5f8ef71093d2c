"""Weights for a model without files: small, fixed, and the same on every machine of a kind."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from scheduler_proc.layers.target import LoadTarget

SPREAD = 1e-3
"""Values are uniform in (-SPREAD, SPREAD)."""


def dummy_tensor(
    name: str, target: LoadTarget, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Parameter `name` on a device: ones for a norm, else drawn from (seed, name) and the kind of device alone."""
    if target.is_norm:
        return torch.ones(target.shape, device=device, dtype=dtype)
    generator = torch.Generator(device).manual_seed((seed << 32) | zlib.crc32(name.encode()))
    return torch.empty(target.shape, device=device, dtype=dtype).uniform_(-SPREAD, SPREAD, generator=generator)
