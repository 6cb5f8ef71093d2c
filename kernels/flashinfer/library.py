"""The part of FlashInfer that is used, and its import."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

import torch
from torch import Tensor


class Planned(Protocol):
    """A wrapper object of FlashInfer's: `plan` once a step, on the host, then `run` in every layer."""

    plan: Callable[..., None]
    run: Callable[..., Tensor | tuple[Tensor, Tensor]]


class FlashInfer(Protocol):
    """What is called of the module `flashinfer`, 0.6."""

    xqa: Callable[..., None]
    BatchPrefillWithPagedKVCacheWrapper: Callable[..., Planned]
    BatchDecodeWithPagedKVCacheWrapper: Callable[..., Planned]


def flashinfer() -> FlashInfer:
    """The module; seconds at the first call. Raises ValueError where it is not installed."""
    try:
        return cast(FlashInfer, importlib.import_module("flashinfer"))
    except ModuleNotFoundError as e:
        raise ValueError(f"FlashInfer cannot be imported ({e}): pip install 'engine-serve[cuda]'") from e
    except Exception as e:
        raise ValueError(f"FlashInfer is installed, but fails when it is imported: {type(e).__name__}: {e}") from e


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device, (0, 0) of another."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
