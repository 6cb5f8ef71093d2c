"""What an installation consists of: the packages beside others, and the CPU kernels with or without a compiler.

Our top-level package `kernels` shares its name with a package that transformers looks for; both must live.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kernels.cpu import build

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernels/cpu/src"


def setuptools_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


def test_kernels_is_ours() -> None:
    assert set(importlib.metadata.packages_distributions()["kernels"]) == {"engine-serve"}


def test_the_version_is_none_that_transformers_takes_for_its_kernels() -> None:
    version = version_tuple(importlib.metadata.version("engine-serve"))
    assert not (0, 18, 2) <= version < (0, 19)


def test_the_version_is_the_packages() -> None:
    import engine

    assert importlib.metadata.version("engine-serve") == engine.__version__


def test_transformers_works_beside_our_packages() -> None:
    code = """
import kernels
from transformers import LlamaConfig, LlamaModel
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
assert sum(p.numel() for p in LlamaModel(config).parameters()) > 1000
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_extension_is_declared_with_all_it_is_made_of() -> None:
    (extension,) = setuptools_table()["ext-modules"]
    assert extension["name"] == "kernels.cpu._kernels"
    assert extension["optional"] and extension["py-limited-api"]
    assert sorted(extension["sources"]) == sorted(str(path.relative_to(ROOT)) for path in SOURCES.glob("*.cpp"))


def test_every_source_is_shipped() -> None:
    patterns = setuptools_table()["package-data"]["kernels.cpu"]
    shipped = {path for pattern in patterns for path in (ROOT / "kernels/cpu").glob(pattern)}
    assert shipped == set(SOURCES.iterdir())


def test_the_build_step_is_found_and_needs_none_of_our_packages() -> None:
    pytest.importorskip("setuptools")
    module, _, name = setuptools_table()["cmdclass"]["build_ext"].rpartition(".")
    path = ROOT / f"{module.replace('.', '/')}.py"
    code = f"import runpy; found = runpy.run_path({str(path)!r}); assert found[{name!r}].build_extension"
    subprocess.run([sys.executable, "-I", "-c", code], check=True, cwd="/")


@pytest.fixture
def broken_compiler(tmp_path: Path) -> str:
    said = "x.cpp: In function f:\nx.cpp:1:2: error: no such thing\n  1 | f"
    return script(tmp_path / "broken", f"echo '{said}' >&2; exit 1")


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def say(output: Path, compiler: str) -> str:
    """What the build says of `output`, run as an installation runs it."""
    command = [sys.executable, "-I", build.__file__, "--output", str(output)]
    run = subprocess.run(
        command, env={**os.environ, "CXX": compiler}, cwd="/", capture_output=True, text=True, check=True
    )
    assert not run.stderr
    return run.stdout


def test_without_a_compiler_the_build_says_one_line(tmp_path: Path, broken_compiler: str) -> None:
    output = tmp_path / "kernels.so"
    missing = say(output, str(tmp_path / "none"))
    assert missing.startswith("CPU kernels: not built, torch is used instead: ") and "none does not run" in missing
    broken = say(output, broken_compiler)
    assert broken.startswith("CPU kernels: not built, torch is used instead: ")
    assert "(x.cpp:1:2: error: no such thing)" in broken
    assert missing.count("\n") == broken.count("\n") == 1
    assert not output.exists()


def test_the_build_is_done_once(tmp_path: Path, broken_compiler: str) -> None:
    output, compiler = tmp_path / "kernels.so", fake_compiler(tmp_path)
    assert say(output, compiler).startswith("CPU kernels: built in ")
    assert say(output, broken_compiler) == "CPU kernels: up to date\n"
    os.utime(output, (1, 1))
    assert say(output, broken_compiler).startswith("CPU kernels: not built, those from before stay: ")
    assert say(output, compiler).startswith("CPU kernels: built in ")


def fake_compiler(folder: Path) -> str:
    """Writes what it is to write, empty."""
    return script(folder / "c++", 'while [ "$1" != -o ]; do shift; done; : > "$2"')


@pytest.mark.slow
@pytest.mark.parametrize("compiles", [True, False])
def test_a_wheel(tmp_path: Path, compiles: bool) -> None:
    pytest.importorskip("setuptools", "77")
    tree = tmp_path / "tree"
    for name in ("engine", "tokenizer_proc", "scheduler_proc", "detokenizer_proc", "kernels"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    compiler = fake_compiler(tmp_path) if compiles else str(tmp_path / "none")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", "out", "./tree"]
    subprocess.run(command, env={**os.environ, "CXX": compiler}, cwd=tmp_path, check=True)
    (wheel,) = (tmp_path / "out").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert (f"kernels/cpu/{build.LIBRARY}" in names) == compiles
    assert {f"kernels/cpu/src/{path.name}" for path in SOURCES.iterdir()} <= names
