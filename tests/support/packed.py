"""Packed matrices and instruction sets for tests of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from kernels.cpu import native
from kernels.packed_rows import BLOCKS, PackedRows

# Where the float16 scales of a kind's blocks begin.
_SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2)} | {
    "Q6_K": (208,)
}


def random_rows(kind: str, rows: int, cols: int, seed: int = 0) -> PackedRows:
    """Any codes, scales between 0.001 and 0.011."""
    rng = np.random.default_rng(seed)
    block = BLOCKS[kind]
    data = rng.integers(0, 256, (rows, cols // block.columns, block.size_bytes), dtype=np.uint8)
    for place in _SCALES[kind]:
        scales = (rng.random(data.shape[:2]) * 0.01 + 0.001).astype(np.float16)
        data[:, :, place : place + 2] = scales.view(np.uint8).reshape(*data.shape[:2], 2)
    return PackedRows(kind, torch.from_numpy(data.reshape(rows, -1)), cols)


def instruction_sets() -> list[str]:
    """Those this machine has; none where the kernels are not built."""
    if native.library() is None:
        return []
    best = native.isa()
    found = []
    for name in ("scalar", "avx2", "avx512"):
        try:
            native.set_isa(name)
        except ValueError:
            continue
        found.append(name)
    native.set_isa(best)
    return found


needs_kernels = pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
every_isa = pytest.mark.parametrize("isa", instruction_sets())


@contextmanager
def using(isa: str | None = None, threads: int = 2) -> Iterator[None]:
    """Kernels of one instruction set, on so many threads."""
    before = native.isa()
    native.set_threads(threads)
    native.set_isa(isa or before)
    try:
        yield
    finally:
        native.set_isa(before)
        native.set_threads(1)
