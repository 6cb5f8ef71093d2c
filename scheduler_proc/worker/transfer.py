"""Copies between the host and a device that nobody waits for, until somebody wants to read what has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
_NUMPY_TYPES = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}

Piece = tuple[np.ndarray, torch.dtype]
"""An array to be uploaded, and the type it shall have on the device."""


class Transfer:
    """Uploads and downloads of one device, in the order of its stream.

    On CUDA both go through pinned memory of torch's allocator, which hands a block out again only when the copy that
    used it is done; so nothing here waits and nothing is overwritten too early. On the CPU there is nothing to wait
    for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pins = device.type == "cuda"

    def upload(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        """A copy of a host array on the device."""
        return self.upload_all((array, dtype))[0]

    def upload_all(self, *pieces: Piece) -> Sequence[Tensor]:
        """Copies of several arrays; on CUDA they travel as one."""
        if not self._pins:
            return [torch.tensor(array, dtype=dtype) for array, dtype in pieces]
        starts, size = [], 0
        for array, dtype in pieces:
            starts.append(size)
            size += -(-array.size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        host = pinned.numpy()
        for (array, dtype), start in zip(pieces, starts, strict=True):
            typed = host[start : start + array.size * dtype.itemsize].view(_NUMPY_TYPES[dtype])
            typed.reshape(array.shape)[...] = array
        block = torch.empty(size, dtype=torch.uint8, device=self.device)
        block.copy_(pinned, non_blocking=True)
        return [
            block[start : start + array.size * dtype.itemsize].view(dtype).view(array.shape)
            for (array, dtype), start in zip(pieces, starts, strict=True)
        ]

    def download(self, tensor: Tensor) -> Tensor:
        """A host tensor that holds the device's values once `arrival()`, asked for afterwards, has happened.

        On the CPU it is the tensor itself: whoever keeps it beyond the step copies it.
        """
        if not self._pins:
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.copy_(tensor, non_blocking=True)
        return pinned

    def arrival(self) -> torch.cuda.Event | None:
        """What happens when all that was asked for until now is done; None where it has happened."""
        if not self._pins:
            return None
        event = torch.cuda.Event()
        event.record()
        return event
