"""Tensors of safetensors files, one file mapped at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelFileError
from scheduler_proc.weights.checkpoint import CheckpointTensor

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def safetensors_tensors(files: Sequence[str]) -> list[CheckpointTensor]:
    """Every tensor of the files, in file order. Reads headers only.

    Raises ModelFileError for a file that is missing, broken, a Git LFS pointer or of an element type not read here.
    """
    shards = _OpenShard()
    found: list[CheckpointTensor] = []
    for file in files:
        handle = shards.open(file)
        for name in handle.keys():  # noqa: SIM118 - the handle is no mapping
            info = handle.get_slice(name)
            shape, kind = tuple(info.get_shape()), info.get_dtype()
            if kind not in _ITEM_BYTES:
                raise ModelFileError(f"{file}: tensor {name} has the unsupported element type {kind}")
            size_bytes = math.prod(shape) * _ITEM_BYTES[kind]
            found.append(CheckpointTensor(name, shape, file, size_bytes, partial(shards.read, file, name)))
    return found


@dataclass
class _OpenShard:
    """The one file that is open: opening the next unmaps the last, so that memory holds one shard at most."""

    file: str | None = None
    handle: Any = None

    def open(self, file: str) -> Any:
        if self.file != file:
            self.handle = None
            try:
                self.handle = safe_open(file, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelFileError(_open_failure(file, error)) from error
            self.file = file
        return self.handle

    def read(self, file: str, name: str) -> Tensor:
        try:
            return self.open(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"{file}: tensor {name} cannot be read: {error}") from error


def _open_failure(file: str, error: Exception) -> str:
    path = Path(file)
    if not path.exists():
        return f"{file}: no such file"
    if path.is_dir():
        return f"{file}: a directory, not a file"
    with path.open("rb") as opened:
        if opened.read(40).startswith(b"version https://git-lfs"):
            return f"{file}: a Git LFS pointer, not the weights themselves; fetch the real file"
    return f"{file}: not a readable safetensors file: {error}"
