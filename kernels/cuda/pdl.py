"""Programmatic dependent launch: kernels begin before the one before them has ended; docs/kernels.md has the rules.

A kernel that takes part has a `PDL: tl.constexpr`, and is launched with that and with `launch_pdl`. What is short lets
the next kernel begin first and then waits; what fetches much waits first, so that one such kernel is ahead at most.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_is_asked_for: ContextVar[bool] = ContextVar("dependent launch", default=False)


@contextmanager
def dependent_launch(is_asked_for: bool = True) -> Generator[None]:
    """What is launched meanwhile takes part, on devices that have it."""
    token = _is_asked_for.set(is_asked_for)
    try:
        yield
    finally:
        _is_asked_for.reset(token)


def is_wanted(tensor: Tensor) -> bool:
    """Whether kernels on a tensor's device take part now."""
    return _is_asked_for.get() and can(tensor.device)


@cache
def can(device: torch.device) -> bool:
    """Whether a device has it: compute capability 9.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def prefetch(pointers):
    """Ask for what is behind each pointer to be in the second-level cache soon: a step comes by a layer's weights once,
    so they are not near. It reads nothing, so who wrote it last does not matter.
    """
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // nothing for $0",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def prefetch_vector(vector, SIZE: tl.constexpr):
    """`prefetch` of SIZE dense elements, by the first program for all others."""
    if tl.program_id(0) == 0:
        PARTS: tl.constexpr = triton.next_power_of_2((SIZE + 15) // 16)
        prefetch(vector + tl.minimum(tl.arange(0, PARTS) * 16, SIZE - 1))
