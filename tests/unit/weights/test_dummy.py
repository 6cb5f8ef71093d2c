"""Dummy weights: fixed, small, independent of order, and safe to run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from scheduler_proc.weights.dummy import dummy_tensor
from scheduler_proc.weights.load import load_weights
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import run_one
from tests.unit.weights.files import empty_decoder, hf_files


def test_dummy(tmp_path: Path) -> None:
    files = hf_files(write_tiny_model(tmp_path, "qwen3", tokenizer=False))
    files = msgspec.structs.replace(files, format="dummy", weight_files=())
    one, other = empty_decoder(files), empty_decoder(files)
    calls: list[tuple[str, int, int]] = []
    load_weights(one, files, lambda *call: calls.append(call))
    load_weights(other, files)
    assert calls[-1][1] == calls[-1][2] == sum(4 * p.numel() for p in one.parameters().values())
    for name, parameter in one.parameters().items():
        assert torch.equal(parameter, other.parameters()[name])
        if "norm" in name:
            assert bool((parameter == 1).all())
        else:
            assert 0 < float(parameter.abs().max()) <= 1e-3
            assert float(parameter.std()) > 4e-4
    assert bool(run_one(one, torch.arange(20)).isfinite().all())
    targets = one.targets()
    up, gate = (
        dummy_tensor(f"layers.0.mlp.{part}.weight", targets[f"layers.0.mlp.{part}.weight"]) for part in ("up", "gate")
    )
    assert not torch.equal(up, gate)
