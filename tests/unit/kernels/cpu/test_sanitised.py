"""The kernel tests once more, on a library built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu.build import compile_library
from tests.support.packed import needs_kernels

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    needs_kernels,
    pytest.mark.skipif(shutil.which("g++") is None, reason="the sanitisers' libraries are found through g++"),
]


def _runtime(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_kernel_tests_are_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtimes = [_runtime("libasan.so"), _runtime("libubsan.so")]
    if not all(os.path.isabs(runtime) for runtime in runtimes):
        pytest.skip("g++ has no sanitisers here")
    monkeypatch.setenv("CXX", "g++")
    library = tmp_path / "_kernels.so"
    compile_library(library, sanitise=True)
    environment = os.environ | {
        "ENGINE_CPU_LIBRARY": str(library),
        "LD_PRELOAD": " ".join(runtimes),
        # Python itself never gives back all it took.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", str(here)],
        env=environment,
        capture_output=True,
        text=True,
        cwd=here.parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
