"""Arrays far larger than what is ever used of them: memory is taken page by page, as it is first written."""

from __future__ import annotations

import math
import mmap

import numpy as np


def virtual_array(shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
    """Zeros of `shape` that cost nothing before they are touched.

    Without huge pages: rows are far apart, and the first write to each would clear 2 MB for the few bytes it needs.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=dtype, count=math.prod(shape)).reshape(shape)
