"""Starts the ranks of a group as processes of their own, for a while."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from engine.model_files.types import ModelFiles
from kernels.dispatch import select
from scheduler_proc.layers.linear import LinearMethod, Unquantised
from scheduler_proc.layers.packed import Packed
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.parallel.group import Group
from scheduler_proc.weights.load import load_weights

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0


def run_ranks(module: str, size: int, *args: str) -> list[str]:
    """Run `python -m module RANK SIZE ARGS...` once for each rank; what each has printed. All must succeed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(size), *args],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=TIMEOUT_S) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in told)
    return [output for output, _ in told]


def loaded_decoder(
    files: ModelFiles, group: Group | None = None, *, packed: bool = False, device: str = "cpu"
) -> Decoder:
    """A decoder with its weights, in float32; packed: to int8."""
    kernels = select(torch.device(device).type, torch.float32, "", packed=packed)
    method: LinearMethod = Packed(kernels) if packed else Unquantised(kernels)
    decoder = Decoder(spec_of(files.config), kernels, device, torch.float32, method=method, group=group)
    load_weights(decoder, files)
    return decoder
