"""Compiling Triton kernels for a GPU without having one. Not for a process whose kernels are interpreted."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Compiled:
    """What a compiled kernel takes of a multiprocessor."""

    registers: int
    """Of each thread."""
    spilled_bytes: int
    """Of each thread's registers, kept in memory."""
    shared_bytes: int
    ptx: str
    cubin: bytes


def compile_kernel(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    capability: int = 90,
    num_warps: int = 4,
    num_stages: int = 3,
    aligned: tuple[str, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> Compiled:
    """Compile a `triton.jit` function for a compute capability (80, 90, ...).

    types: Triton's names of the arguments' types, such as `*bf16` or `i32`; constants: the `tl.constexpr` arguments
    (and pointers that are None); aligned: arguments, pointers too, that are multiples of 16, as launches find out by
    themselves. Raises what Triton or ptxas raise.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, dict(constants), attrs)
    settings = {"num_warps": num_warps, "num_stages": num_stages, **(options or {})}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=settings)
    registers, spilled = _resources(done.asm["cubin"])
    return Compiled(registers, spilled, done.metadata.shared, done.asm["ptx"], done.asm["cubin"])


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, by the cuobjdump that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert found is not None, told.stdout
    return int(found[1]), int(found[2])
