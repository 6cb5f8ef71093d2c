"""Tensors of GGUF files, one at a time from the mapped file: packed as they are, or de-quantised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.model_files.gguf_header import GgufTensor, read_gguf_header
from kernels.packed_rows import PACKED_KINDS, PackedRows
from scheduler_proc.weights.checkpoint import CheckpointTensor

_FLOATS = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})
READABLE_TYPES = (*_FLOATS, *PACKED_KINDS)
"""ggml element types that can be loaded."""


def gguf_tensors(files: Sequence[str]) -> list[CheckpointTensor]:
    """Every tensor of the files; reading one gives float32. Reads headers only.

    Raises ModelFileError for a broken header and for an element type outside READABLE_TYPES, naming tensor and type.
    """
    found: list[CheckpointTensor] = []
    for file in files:
        for tensor in read_gguf_header(file).tensors.values():
            if tensor.type.name not in READABLE_TYPES:
                raise ModelFileError(
                    f"{file}: tensor {tensor.name} has the type {tensor.type.name}, "
                    f"which cannot be loaded; readable: {', '.join(READABLE_TYPES)}"
                )
            read_packed = partial(_map_packed, file, tensor) if _is_packed_matrix(tensor) else None
            read = partial(_read, file, tensor)
            found.append(CheckpointTensor(tensor.name, tensor.shape, file, tensor.size_bytes, read, read_packed))
    return found


def unpermute_rotary_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Put a q or k projection's rows (or its bias) back from interleaved rotary order into halves.

    tensor: `[num_heads * head_dim, ...]`. GGUF files of the Llama line hold, per head, row i next to row
    i + head_dim / 2, as the conversion to GGML's rotary layout left them.
    """
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def has_packed_matrices(files: Sequence[str]) -> bool:
    """Whether any matrix of the files can stay packed. Reads headers only; raises ModelFileError."""
    return any(_is_packed_matrix(tensor) for file in files for tensor in read_gguf_header(file).tensors.values())


def _is_packed_matrix(tensor: GgufTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.type.name in PACKED_KINDS


def _read(file: str, tensor: GgufTensor) -> Tensor:
    dtype = _FLOATS.get(tensor.type.name)
    if dtype is not None:
        return _map(file, tensor).view(dtype).to(torch.float32, copy=True).reshape(tensor.shape)
    return _map_packed(file, tensor).dequantise().reshape(tensor.shape)


def _map_packed(file: str, tensor: GgufTensor) -> PackedRows:
    rows = math.prod(tensor.shape[:-1])
    return PackedRows(tensor.type.name, _map(file, tensor).reshape(rows, -1), tensor.shape[-1])


def _map(file: str, tensor: GgufTensor) -> Tensor:
    """uint8 `[size_bytes]`: the tensor's bytes, mapped."""
    try:
        # Copy on write rather than read only: torch has no read-only tensors, and warns of what it cannot write to.
        return torch.from_numpy(np.memmap(file, np.uint8, "c", tensor.offset, (tensor.size_bytes,)))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file}: tensor {tensor.name} cannot be read: {error}") from error
