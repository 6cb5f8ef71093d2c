"""Gates in Triton against kernels.activation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import activation as reference
from kernels.cuda import activation

FUNCTIONS = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")


def pair(name: str) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    return getattr(activation, name), getattr(reference, name)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (3, 100), (2, 2600)])
def test_gates(name: str, dtype: torch.dtype, shape: tuple[int, int], device: torch.device) -> None:
    kernel, expected_of = pair(name)
    wide = torch.full((shape[0], shape[1] + 8), torch.nan)
    wide[:, : shape[1]] = torch.randn(shape, generator=torch.Generator().manual_seed(shape[1])) * 4
    gate_up = wide.to(device, dtype)[:, : shape[1]]
    got, expected = kernel(gate_up), expected_of(gate_up)
    assert got.dtype == dtype and got.shape == expected.shape
    cut_off = dtype == torch.bfloat16 and device.type == "cpu"
    # The references of gelu lose what cancels, where 1 + tanh or 1 + erf is small; two roundings may differ by a bit.
    bits = torch.finfo(dtype).eps * (3 if cut_off else 2)
    torch.testing.assert_close(got.float(), expected.float(), atol=1e-5, rtol=bits + 2e-6)
    if dtype == torch.float16:
        assert (got == expected).float().mean() > 0.95


@pytest.mark.parametrize("name", FUNCTIONS)
def test_far_from_zero(name: str, device: torch.device) -> None:
    kernel, expected_of = pair(name)
    gate = torch.tensor([-1e4, -80.0, -9.0, -0.0, 9.0, 80.0, 1e4, torch.nan])
    gate_up = torch.stack((gate, torch.ones_like(gate))).flatten().unsqueeze(0).to(device)
    torch.testing.assert_close(kernel(gate_up), expected_of(gate_up), equal_nan=True)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing(name: str, device: torch.device) -> None:
    assert pair(name)[0](torch.empty(0, 16, device=device)).shape == (0, 8)
