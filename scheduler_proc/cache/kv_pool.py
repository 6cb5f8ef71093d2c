"""The memory of KV pages, and how many of them there are."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import psutil
import torch

from engine.errors import ConfigError
from scheduler_proc import cgroup

DEFAULT_TOKENS = 65_536
"""Most tokens of KV that a CPU start takes unasked."""
MEMORY_SHARE = 0.25
"""Most of the available memory that a CPU start takes for KV unasked."""
SCALE_BYTES = 4
"""What follows an int8 head: the float32 that its codes are multiplied by."""


class KVPool:
    """Per layer one tensor [num_pages, 2, page_size, num_kv_heads, head_dim]; index 0 of axis 1 is K, 1 is V.

    dtype torch.int8: the last axis is head_dim codes and then the SCALE_BYTES of their scale; value = code * scale.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_pages, 2, page_size, num_kv_heads, _head_bytes(head_dim, dtype) // dtype.itemsize)
        self.layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    def fill(self, pages: torch.Tensor, value: float) -> None:
        """Overwrite whole pages (int64 [m]) of every layer: each key and value reads as about `value` afterwards."""
        for layer in self.layers:
            layer[pages] = _int8_head(layer.shape[-1], value).to(layer.device) if layer.dtype == torch.int8 else value


def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a pool for each of its tokens."""
    return num_layers * 2 * num_kv_heads * _head_bytes(head_dim, dtype)


def _head_bytes(head_dim: int, dtype: torch.dtype) -> int:
    return head_dim * dtype.itemsize + (SCALE_BYTES if dtype == torch.int8 else 0)


def _int8_head(size: int, value: float) -> torch.Tensor:
    """int8 [size]: the greatest code in all places, and the scale that makes it `value`."""
    largest = torch.iinfo(torch.int8).max
    codes = torch.full((size - SCALE_BYTES,), largest, dtype=torch.int8)
    return torch.cat([codes, torch.tensor([value / largest], dtype=torch.float32).view(torch.int8)])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU memory that the kernel hands out page by page as it is first written, at no cost before."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes this process may still take: the machine's available memory, or less by its control groups' limits.

    root: stands for the file system's root where the control groups are looked up.
    """
    available = psutil.virtual_memory().available
    allowed = cgroup.available_bytes(root)
    return available if allowed is None else min(available, allowed)


def default_tokens(bytes_per_token: int, page_size: int) -> int:
    """Tokens of a CPU pool whose size nobody set; a whole number of pages, at least one."""
    tokens = min(DEFAULT_TOKENS, int(available_memory() * MEMORY_SHARE) // bytes_per_token)
    return max(tokens // page_size, 1) * page_size


def fraction_tokens(
    fraction: float, available_bytes: int, weight_bytes: int, bytes_per_token: int, page_size: int
) -> int:
    """Tokens of a pool that takes, with the weights, `fraction` of what was available before them; whole pages.

    Raises ConfigError if that leaves no page.
    """
    room = int(fraction * available_bytes) - weight_bytes
    pages = room // (bytes_per_token * page_size)
    if pages < 1:
        raise ConfigError(
            f"--mem-fraction-static {fraction:g} of {available_bytes / 2**20:.0f} MiB leaves no room for KV beside "
            f"{weight_bytes / 2**20:.0f} MiB of weights; raise it, or set --max-total-tokens."
        )
    return pages * page_size
