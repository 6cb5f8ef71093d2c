"""Tensors of GGUF files, de-quantised one at a time from the mapped file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch
from gguf import quants
from torch import Tensor

from engine.errors import ModelFileError
from engine.model_files.gguf_header import GgufTensor, read_gguf_header
from scheduler_proc.weights.checkpoint import CheckpointTensor

_BLOCK_CODECS = MappingProxyType(
    {
        "Q4_0": quants.Q4_0,
        "Q4_1": quants.Q4_1,
        "Q5_0": quants.Q5_0,
        "Q5_1": quants.Q5_1,
        "Q8_0": quants.Q8_0,
        "Q4_K": quants.Q4_K,
        "Q5_K": quants.Q5_K,
        "Q6_K": quants.Q6_K,
        "BF16": quants.BF16,
    }
)
READABLE_TYPES = ("F32", "F16", *_BLOCK_CODECS)
"""ggml element types that can be loaded."""

# Elements de-quantised at once: small enough for the intermediate arrays to stay in cache.
_CHUNK_ELEMENTS = 1 << 17


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
            read = partial(_read, file, tensor)
            found.append(CheckpointTensor(tensor.name, tensor.shape, file, tensor.size_bytes, read))
    return found


def unpermute_rotary_rows(tensor: Tensor, num_heads: int) -> Tensor:
    """Put a q or k projection's rows (or its bias) back from interleaved rotary order into halves.

    tensor: `[num_heads * head_dim, ...]`. GGUF files of the Llama line hold, per head, row i next to row
    i + head_dim / 2, as the conversion to GGML's rotary layout left them.
    """
    pairs = tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _read(file: str, tensor: GgufTensor) -> Tensor:
    kind = tensor.type
    num_blocks = tensor.size_bytes // kind.block_bytes
    try:
        data = np.memmap(file, np.uint8, "r", tensor.offset, (num_blocks, kind.block_bytes))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{file}: tensor {tensor.name} cannot be read: {error}") from error
    values = np.empty((num_blocks, kind.block_elements), np.float32)
    if kind.name in ("F32", "F16"):
        np.copyto(values, data.view(np.float32 if kind.name == "F32" else np.float16))
    else:
        codec = _BLOCK_CODECS[kind.name]
        step = max(1, _CHUNK_ELEMENTS // kind.block_elements)
        # Block by block numbers are the same as whole rows; the package's own row loop is half as fast.
        for start in range(0, num_blocks, step):
            values[start : start + step] = codec.dequantize_blocks(np.asarray(data[start : start + step]))
    return torch.from_numpy(values).reshape(tensor.shape)
