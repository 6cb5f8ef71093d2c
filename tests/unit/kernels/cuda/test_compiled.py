"""Every CUDA kernel compiles for real devices, in the configurations that models use, and spills nothing.

The kernels of this process are interpreted, so another one compiles them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = sorted(path.stem for path in HERE.glob("compiled_*.py"))

PROGRAM = """
import importlib, json, sys
module = importlib.import_module("tests.unit.kernels.cuda." + sys.argv[1])
found = [[name, done.registers, done.spilled_bytes, done.shared_bytes] for name, done in module.compile_all()]
print(json.dumps(found))
"""

MOST_SHARED_BYTES = 227 * 1024
"""What a program may have on compute capability 9.0."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("module", MODULES)
def test_compiles_without_spills(module: str, tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(HERE.parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], capture_output=True, text=True, env=environment, cwd=HERE.parents[3]
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = json.loads(done.stdout.splitlines()[-1])
    assert kernels
    for name, registers, spilled, shared in kernels:
        print(f"{name}: {registers} registers, {spilled} bytes spilled, {shared} bytes shared")
        assert spilled == 0, name
        assert shared <= MOST_SHARED_BYTES, name
