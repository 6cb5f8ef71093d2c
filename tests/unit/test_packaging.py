"""Our top-level package `kernels` shares its name with a package that transformers looks for; both must live."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
