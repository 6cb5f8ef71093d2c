"""Looking up rows in Triton against kernels.linear."""

from __future__ import annotations

import pytest
import torch

from kernels import linear as reference
from kernels.cuda.embedding import embed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 96, 1032])
def test_embed(dtype: torch.dtype, dim: int, device: torch.device) -> None:
    wide = torch.full((50, dim + 8), torch.nan)
    wide[:, :dim] = torch.randn(50, dim)
    table = wide.to(device, dtype)[:, :dim]
    ids = torch.tensor([49, 0, 7, 7, 31], device=device)
    got = embed(table, ids)
    assert got.dtype == dtype
    assert torch.equal(got, reference.embed(table, ids))


def test_nothing(device: torch.device) -> None:
    ids = torch.empty(0, dtype=torch.int64, device=device)
    assert embed(torch.randn(5, 8, device=device), ids).shape == (0, 8)
