"""RMS norm by the CPU kernels against the torch references."""

from __future__ import annotations

import pytest
import torch

from kernels import norm as reference
from kernels import packed
from kernels.cpu import norm as native_ops
from tests.support.packed import every_isa, needs_kernels, using

pytestmark = needs_kernels


@every_isa
@pytest.mark.parametrize("dim", [1, 7, 16, 64, 576, 577])
def test_norms(isa: str, dim: int) -> None:
    torch.manual_seed(dim)
    wide = torch.randn(5, dim + 3)
    x, weight = wide[:, :dim], torch.randn(dim)
    expected = reference.rms_norm(x, weight, 1e-5)
    with using(isa):
        assert torch.allclose(native_ops.rms_norm(x, weight, 1e-5), expected, rtol=2e-6, atol=1e-6)
        rows = packed.dequantise_rows(native_ops.norm_rows(x, weight, 1e-5), dim)
        assert float((rows - expected).abs().max()) <= 0.51 * float(expected.abs().max()) / 127


@every_isa
def test_the_sum_takes_the_place_of_the_residual(isa: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(9, 100), torch.randn(100)
    for op in (native_ops.add_rms_norm, native_ops.add_norm_rows):
        residual = torch.randn(9, 100)
        expected, total = reference.add_rms_norm(x, residual.clone(), weight, 1e-5)
        with using(isa):
            got, kept = op(x, residual, weight, 1e-5)
        assert kept is residual
        assert torch.equal(kept, total)
        wide = got if got.dtype == torch.float32 else packed.dequantise_rows(got, 100)
        assert float((wide - expected).abs().max()) <= 0.51 * float(expected.abs().max()) / 127


@every_isa
def test_a_row_depends_on_itself_alone(isa: str) -> None:
    x, weight = torch.randn(33, 96), torch.randn(96)
    with using(isa, threads=3):
        whole = native_ops.norm_rows(x, weight, 1e-6)
        for i in range(33):
            assert torch.equal(
                native_ops.norm_rows(x[i : i + 1], weight, 1e-6)[:, : 3 * 52], whole[i : i + 1, : 3 * 52]
            )
