"""Builds the CPU kernels with the system's C++ compiler: one shared library with every instruction set in it.

`python -m kernels.cpu.build` does so in a checkout. An installation runs this file as a script (setuptools_build.py):
it imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = "_kernels.abi3.so"
"""The library's name beside this file."""

_COMMON = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
)
_SANITISERS = (
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
    "-g",
    "-O1",
)
_X86_FLAGS = {
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "isa_avx512.cpp": (
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512vnni",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-mprefer-vector-width=512",
    ),
}


_NEWEST = "isa_avx512.cpp"


class CompileError(Exception):
    """There is no compiler, or it refuses the sources. `line` says so in one line, without what the compiler said."""

    def __init__(self, line: str, output: str = "") -> None:
        super().__init__(f"{line}:\n{output}" if output else line)
        self.line = line


def compile_library(output: Path, *, sanitise: bool = False, source_dir: Path = SOURCES) -> None:
    """Compile the library to `output`; raises CompileError. The compiler is $CXX, else c++, g++ or clang++."""
    begin = time.time()
    compiler = _compiler()
    x86 = platform.machine() in ("x86_64", "AMD64")
    names = ["isa_scalar.cpp", "pack.cpp", "pool.cpp", *(_X86_FLAGS if x86 else ())]
    extra = _SANITISERS if sanitise else ()
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompileError(f"{output.parent} cannot be written to: {error.strerror}") from error
    with tempfile.TemporaryDirectory() as folder:

        def compiled(name: str, *defines: str) -> str | None:
            target = str(Path(folder) / f"{Path(name).stem}.o")
            flags = (*_COMMON, *_X86_FLAGS.get(name, ()), *extra, *defines)
            try:
                _run([*compiler, *flags, "-c", str(source_dir / name), "-o", target])
            except CompileError:
                # An older compiler may not know the newest instructions; the others will do.
                if name == _NEWEST:
                    return None
                raise
            return target

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = dict(zip(names, pool.map(compiled, names), strict=True))
        main_object = compiled("main.cpp", *(["-DENGINE_WITH_AVX512"] if found.get(_NEWEST) else []))
        objects = [name for name in (main_object, *found.values()) if name is not None]
        # Written aside and renamed: a process that has the old one mapped keeps it whole.
        fresh = output.with_suffix(f".{os.getpid()}.tmp")
        _run([*compiler, "-shared", "-pthread", *extra, *objects, "-o", str(fresh)])
        # Sources that change while they are compiled are newer than the library.
        os.utime(fresh, (begin, begin))
        fresh.replace(output)


def newest_source() -> float:
    """When the sources were last changed, in seconds since the epoch."""
    return max(path.stat().st_mtime for path in (*SOURCES.iterdir(), Path(__file__)))


def _compiler() -> list[str]:
    asked = os.environ.get("CXX", "").strip()
    if asked:
        try:
            return shlex.split(asked)
        except ValueError as error:
            raise CompileError(f"CXX={asked}: {error}") from error
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise CompileError("no C++ compiler found (c++, g++ or clang++; or set CXX)")


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise CompileError(f"{command[0]} failed ({errors[0].strip() if errors else 'no error line'})", done.stderr)


def build(target: Path) -> str:
    """Compile to `target` unless that is newer than the sources; returns a line about it. Raises CompileError."""
    if target.exists() and target.stat().st_mtime >= newest_source():
        return "up to date"
    begin = time.monotonic()
    compile_library(target)
    return f"built in {time.monotonic() - begin:.0f} s"


def main() -> None:
    """Prints one line. A library that cannot be built is no failure: the engine works without it, with torch."""
    parser = argparse.ArgumentParser(description="Build the CPU kernels where they are not newer than their sources.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name(LIBRARY))
    parser.add_argument("--verbose", action="store_true", help="print all that a failing compiler says")
    arguments = parser.parse_args()
    try:
        said = build(arguments.output)
    except CompileError as error:
        instead = "those from before stay" if arguments.output.exists() else "torch is used instead"
        said = f"not built, {instead}: {error if arguments.verbose else error.line}"
    print(f"CPU kernels: {said}")


if __name__ == "__main__":
    main()
