"""Where a checkpoint's tensors go: the contract between layers, which know their shards, and weight loaders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.packed_rows import PackedRows


@dataclass(frozen=True)
class LoadTarget:
    """One tensor a layer wants. `load` takes the whole tensor, on the host, and keeps this process's shard of it."""

    shape: tuple[int, ...]
    """Shape of the whole tensor, before sharding."""
    load: Callable[[Tensor | PackedRows], object]
    is_norm: bool = False
    """A norm's weight, neutral at 1 rather than 0."""
    takes_packed: bool = False
    """`load` keeps a matrix packed: it takes PackedRows where the checkpoint has them, and packs floats itself."""
