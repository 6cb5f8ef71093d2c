"""What every checkpoint format gives the loader: its tensors, known by header and readable one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from kernels.packed_rows import PackedRows


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint file, not yet read."""

    name: str
    shape: tuple[int, ...]
    """Row-major, as torch will hold it."""
    file: str
    size_bytes: int
    """Bytes in the file."""
    read: Callable[[], Tensor]
    """Reads the tensor on the host. Raises ModelFileError naming tensor and file."""
    read_packed: Callable[[], PackedRows] | None = None
    """Maps a quantised matrix as the file has it, without a copy; None for other tensors. Raises ModelFileError."""
