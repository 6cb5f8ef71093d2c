"""The library of CPU kernels: finding it, its threads, running ops at once or recording them for later."""

from __future__ import annotations

import ctypes
import errno
import os
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.abi import ABI, Args, Op, op
from kernels.cpu.tree import StepTrees

_LIBRARY = Path(__file__).parent / "_kernels.abi3.so"


class Recorder(Protocol):
    """Takes ops instead of running them; see kernels.cpu.program."""

    @property
    def trees(self) -> StepTrees:
        """What the program's attention reads at its runs."""
        ...

    def add(self, args: Args, num_tokens: int, num_rows: int) -> None: ...

    def adopt(self, tensor: Tensor) -> None: ...


recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)
"""Who takes the ops that are called now; None = they run."""


@cache
def library() -> ctypes.CDLL | None:
    """The library, or None where it was not built or is of another version. Raises OSError if it is something else.

    ENGINE_CPU_LIBRARY names another file; ENGINE_CPU_ISA (scalar, avx2, avx512) an instruction set other than the best.
    """
    path = Path(os.environ.get("ENGINE_CPU_LIBRARY") or _LIBRARY)
    if not path.exists():
        return None
    lib = ctypes.CDLL(str(path))
    if not hasattr(lib, "engine_cpu_abi"):
        raise OSError(f"{path}: not a library of CPU kernels")
    if lib.engine_cpu_abi() != ABI:
        return None
    i32, i64, pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
    lib.engine_cpu_isa.restype = ctypes.c_char_p
    lib.engine_cpu_set_isa.argtypes = (ctypes.c_char_p,)
    lib.engine_cpu_set_threads.argtypes = (i32,)
    lib.engine_cpu_run.argtypes = (pointer, i64, i64, i64)
    lib.engine_cpu_run.restype = None
    lib.engine_cpu_packed_bytes.argtypes = (i32, i64, i64)
    lib.engine_cpu_packed_bytes.restype = i64
    lib.engine_cpu_pack.argtypes = (i32, i64, i64, pointer, i64, pointer)
    lib.engine_cpu_pack.restype = None
    lib.engine_cpu_pack_int8.argtypes = (i64, i64, pointer, i64, pointer)
    lib.engine_cpu_pack_int8.restype = None
    lib.engine_cpu_step_inputs.argtypes = (pointer, pointer, i64, i64, pointer, pointer)
    lib.engine_cpu_step_inputs.restype = i64
    lib.engine_cpu_advance.argtypes = (pointer, pointer, pointer, i64)
    lib.engine_cpu_advance.restype = None
    asked = os.environ.get("ENGINE_CPU_ISA")
    if asked:
        set_isa(asked, lib)
    return lib


def loaded() -> ctypes.CDLL:
    """The library; raises RuntimeError where there is none."""
    lib = library()
    if lib is None:
        raise RuntimeError("the CPU kernels are not built: python -m kernels.cpu.build (needs a C++ compiler)")
    return lib


def isa() -> str:
    """The instruction set in use."""
    return loaded().engine_cpu_isa().decode()


def set_isa(name: str, lib: ctypes.CDLL | None = None) -> None:
    """Use another instruction set. Raises ValueError if there is none of that name, or not on this machine."""
    failed = (lib or loaded()).engine_cpu_set_isa(name.encode())
    if failed == errno.ENOTSUP:
        raise ValueError(f"this machine does not have the instruction set {name!r}")
    if failed:
        raise ValueError(f"no CPU kernels for the instruction set {name!r}; there are scalar, avx2, avx512")


def set_threads(count: int) -> None:
    """Size of the pool that runs ops, the calling thread included. Raises ValueError or OSError."""
    failed = loaded().engine_cpu_set_threads(count)
    if failed == errno.EINVAL:
        raise ValueError(f"{count} threads: 1 to 1024 can be had")
    if failed:
        raise OSError(failed, f"cannot start {count} threads: {os.strerror(failed)}")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """An op's output: anything in it. Part of the program while ops are recorded."""
    tensor = torch.empty(shape, dtype=dtype)
    taker = recorder.get()
    if taker is not None:
        taker.adopt(tensor)
    return tensor


def emit(args: Args, num_tokens: int, num_rows: int = 0) -> None:
    """Run an op over `num_tokens` tokens (of `num_rows` rows, for those that go by rows), or record it."""
    taker = recorder.get()
    if taker is not None:
        taker.add(args, num_tokens, num_rows)
        return
    loaded().engine_cpu_run(ctypes.byref(op(args)), 1, num_tokens, num_rows)


def run(ops: ctypes.Array[Op], begin: int, end: int, num_tokens: int, num_rows: int) -> None:
    """Run ops [begin, end) one after the other."""
    start = ctypes.addressof(ops) + begin * ctypes.sizeof(Op)
    loaded().engine_cpu_run(start, end - begin, num_tokens, num_rows)
