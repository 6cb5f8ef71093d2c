"""The dispatch table: defaults, overrides and their errors."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kernels.dispatch import select
from kernels.implementations import IMPLEMENTATIONS, Implementation, Target
from kernels.norm import rms_norm
from kernels.sampling import argmax_rows


def _other_table(serves: bool) -> dict[str, tuple[Implementation, ...]]:
    other = Implementation("other", "kernels.sampling:argmax_rows", lambda target: serves)
    return {**IMPLEMENTATIONS, "rms_norm": (other, *IMPLEMENTATIONS["rms_norm"])}


def test_default_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ENGINE_KERNELS", raising=False)
    assert select("cpu", torch.float32).rms_norm is rms_norm
    monkeypatch.setenv("ENGINE_KERNELS", " rms_norm = torch ,")
    assert select("cpu", torch.float32, table=_other_table(True)).rms_norm is rms_norm
    monkeypatch.setenv("ENGINE_KERNELS", "nonsense=torch")
    with pytest.raises(ValueError, match="unknown op 'nonsense'; ops: rms_norm"):
        select("cpu", torch.float32)


def test_first_that_serves_is_taken() -> None:
    assert select("cpu", torch.float32, "", _other_table(True)).rms_norm is argmax_rows
    assert select("cpu", torch.float32, "", _other_table(False)).rms_norm is rms_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("rms_norm", "not of the form op=impl"),
        ("what=torch", "unknown op 'what'; ops: .*paged_attention"),
        ("rms_norm=cuda", "no implementation 'cuda'; it has: other, native, triton, torch"),
        ("rms_norm=triton", "'triton' of op rms_norm does not serve cpu with torch.float32; what does: torch"),
        ("rms_norm=other", "'other' of op rms_norm does not serve cpu with torch.float32; what does: torch"),
    ],
)
def test_override_errors(overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select("cpu", torch.float32, overrides, _other_table(False))


def test_every_path_exists() -> None:
    for op, implementations in IMPLEMENTATIONS.items():
        for implementation in implementations:
            if implementation.serves(Target("cpu", torch.float32, packed=True)):
                chosen = select("cpu", torch.float32, f"{op}={implementation.name}", packed=True)
                assert callable(getattr(chosen, op))
            else:
                assert importlib.util.find_spec(implementation.path.partition(":")[0]) is not None
