"""The hash bit for bit, and the noise to 1e-5."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import noise as reference
from kernels.cuda.noise import gumbel, hash_stepped, row_keys, step_columns, unstep_columns
from tests.unit.kernels.cuda.draws import exact_noise


def _natural(values: Tensor) -> Tensor:
    return math.log(2) * values.double() - math.log(math.log(2))


@triton.jit
def _write(
    seeds, positions, bits, again, values, COLUMNS: tl.constexpr, PURPOSE: tl.constexpr, INSTRUCTION: tl.constexpr
):
    row = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)
    key_a, key_b = row_keys(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
    stepped = step_columns(columns, key_a)
    hashed = hash_stepped(stepped, key_b)
    place = row * COLUMNS + columns
    tl.store(bits + place, hashed.to(tl.int32, bitcast=True))
    tl.store(again + place, unstep_columns(stepped, key_a))
    tl.store(values + place, gumbel(hashed, INSTRUCTION))


@pytest.mark.parametrize("purpose", [reference.SAMPLE, reference.RESIDUAL])
def test_against_the_reference(purpose: int, device: torch.device) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789012], device=device)
    positions = torch.tensor([0, 1, 2**31, 2**32 - 1, 5, 6], device=device)
    columns = 4096
    bits, again = (torch.empty(6, columns, dtype=torch.int32, device=device) for _ in range(2))
    values = torch.empty(6, columns, device=device)
    kernel: Any = _write[(6,)]
    kernel(seeds, positions, bits, again, values, COLUMNS=columns, PURPOSE=purpose, INSTRUCTION=values.is_cuda)
    assert torch.equal(bits, reference.hash_columns(seeds, positions, purpose, columns))
    assert torch.equal(again, torch.arange(columns, dtype=torch.int32, device=device).expand(6, -1))
    expected = exact_noise(seeds, positions, columns, purpose)
    assert float((_natural(values) - expected).abs().max()) < 1e-5


@triton.jit
def _write_noise(bits, values, COLUMNS: tl.constexpr, INSTRUCTION: tl.constexpr):
    columns = tl.arange(0, COLUMNS)
    tl.store(values + columns, gumbel(tl.load(bits + columns).to(tl.uint32, bitcast=True), INSTRUCTION))


def test_noise_of_extreme_bits(device: torch.device) -> None:
    edges = [0, 1, 2, 5, 100, 127, 128, 129, 200, 2**16, 2**24, 2**30, 2**31 - 129, 2**31 - 2, 2**31 - 1, -1]
    bits = torch.tensor(edges, dtype=torch.int32, device=device)
    values = torch.empty(len(edges), device=device)
    kernel: Any = _write_noise[(1,)]
    kernel(bits, values, COLUMNS=len(edges), INSTRUCTION=values.is_cuda)
    uniform = (bits & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24).double()
    expected = -torch.log(-torch.log1p(-uniform))
    assert bool(values.isfinite().all())
    assert float((_natural(values) - expected).abs().max()) < 1e-5
