"""RMS norms in Triton against kernels.norm."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import norm as reference
from kernels.cuda.norm import add_rms_norm, add_rms_norm_quantised, rms_norm, rms_norm_quantised

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def within_poison(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers whose rows have NaN around them."""
    generator = torch.Generator().manual_seed(sum(shape))
    wide = torch.full((*shape[:-1], shape[-1] + 16), torch.nan)
    wide[..., 8:-8] = torch.randn(shape, generator=generator) * 3
    return wide.to(device, dtype)[..., 8:-8]


def assert_norm(got: Tensor, expected: Tensor) -> None:
    """Equal but for the last bit of each rounding.

    The interpreter cuts off what does not fit into bfloat16 instead of rounding it.
    """
    assert got.dtype == expected.dtype and got.shape == expected.shape and got.is_contiguous()
    cut_off = got.dtype == torch.bfloat16 and got.device.type == "cpu"
    bits = torch.finfo(got.dtype).eps * (3 if cut_off else 2)
    torch.testing.assert_close(got.float(), expected.float(), atol=1e-6, rtol=bits + 2e-6)
    if got.dtype != torch.float32 and not cut_off:
        # Another order of rounding would change a good part of them.
        assert (got == expected).float().mean() > 0.97


def assert_codes(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], x: Tensor) -> None:
    (codes, scales), (expected_codes, expected_scales) = got, expected
    assert codes.dtype == expected_codes.dtype and codes.shape == expected_codes.shape
    assert scales.dtype == torch.float32 and scales.shape == expected_scales.shape
    tolerance = 2e-2 if x.dtype == torch.bfloat16 and x.device.type == "cpu" else torch.finfo(x.dtype).eps + 2e-6
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=tolerance)
    apart = (codes.view(torch.int8).int() - expected_codes.view(torch.int8).int()).abs()
    # -0 and the smallest number below it are not neighbours as bytes; as numbers they are.
    near_zero = codes.float().abs() + expected_codes.float().abs() < 0.01
    assert int(apart[~near_zero].max()) <= 1
    if not (x.dtype == torch.bfloat16 and x.device.type == "cpu"):
        assert (apart == 0).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 80), (19, 128), (2, 3000), (2, 4096)])
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = within_poison(*shape, dtype=dtype, device=device)
    weight = within_poison(shape[1], dtype=dtype, device=device)
    before = x.clone()
    assert_norm(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_of_heads(dtype: torch.dtype, device: torch.device) -> None:
    fused = within_poison(3, 11 * 64, dtype=dtype, device=device)
    q, weight = fused[:, : 9 * 64].view(3, 9, 64), torch.rand(64).add(0.5).to(device, dtype)
    assert_norm(rms_norm(q, weight, EPS), reference.rms_norm(q, weight, EPS))


@pytest.mark.parametrize("shape", [(24,), (2, 3, 2, 24)])
def test_any_leading_dimensions_and_strides(shape: tuple[int, ...], device: torch.device) -> None:
    x, weight = torch.randn(shape, device=device), torch.rand(24, device=device)
    assert_norm(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))
    turned = x.unsqueeze(-1).transpose(-1, -2).expand(*shape[:-1], 5, 24).mT.contiguous().mT
    assert_norm(rms_norm(turned, weight, EPS), reference.rms_norm(turned, weight, EPS))


def test_weights_of_another_type(device: torch.device) -> None:
    x, weight = torch.randn(3, 40).half().to(device), torch.rand(40, device=device)
    assert_norm(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (19, 128), (2, 3000), (2, 16500)])
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    x = within_poison(*shape, dtype=dtype, device=device)
    residual = within_poison(*shape, dtype=dtype, device=device).flip(0).repeat(1, 2)[:, : shape[1]]
    weight = torch.rand(shape[1]).add(0.5).to(device, dtype)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, EPS)
    got, total = add_rms_norm(x, residual, weight, EPS)
    assert_norm(got, expected)
    tolerance = torch.finfo(dtype).eps if dtype == torch.bfloat16 and device.type == "cpu" else 0
    torch.testing.assert_close(total, expected_total, atol=0, rtol=tolerance)


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 128), (2, 3000)])
def test_quantised(shape: tuple[int, int], dtype: torch.dtype, codes: torch.dtype, device: torch.device) -> None:
    x = within_poison(*shape, dtype=dtype, device=device).clone()
    x[1] = 0
    weight = within_poison(shape[1], dtype=dtype, device=device)
    expected = reference.rms_norm_quantised(x, weight, EPS, codes)
    got = rms_norm_quantised(x, weight, EPS, codes)
    assert_codes(got, expected, x)
    assert got[1][1] == 1 and not got[0][1].float().any()


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("shape", [(3, 200), (2, 16500)])
def test_add_quantised(shape: tuple[int, int], codes: torch.dtype, device: torch.device) -> None:
    x, residual = torch.randn(2, *shape).half().to(device)
    weight = torch.rand(shape[1]).half().to(device)
    *expected, expected_total = reference.add_rms_norm_quantised(x, residual, weight, EPS, codes)
    *got, total = add_rms_norm_quantised(x, residual, weight, EPS, codes)
    assert torch.equal(total, expected_total)
    assert_codes((got[0], got[1]), (expected[0], expected[1]), x)


def test_nan_is_kept_and_stays_in_its_row(device: torch.device) -> None:
    x, weight = torch.randn(5, 24, device=device), torch.rand(24, device=device)
    x[2, 3] = torch.nan
    got = rms_norm(x, weight, EPS)
    assert got[2].isnan().all() and not got[[0, 1, 3, 4]].isnan().any()
    codes, scales = rms_norm_quantised(x, weight, EPS, torch.float8_e4m3fn)
    assert codes.float()[2].isnan().all() and scales[2].isnan() and not codes.float()[[0, 1, 3, 4]].isnan().any()


def test_nothing(device: torch.device) -> None:
    x, weight = torch.empty(0, 24, device=device), torch.rand(24, device=device)
    assert rms_norm(x, weight, EPS).shape == (0, 24)
    assert rms_norm(x.view(0, 2, 12), weight[:12], EPS).shape == (0, 2, 12)
    assert [part.shape for part in add_rms_norm(x, x, weight, EPS)] == [(0, 24)] * 2
    codes, scales = rms_norm_quantised(x, weight, EPS, torch.int8)
    assert codes.shape == (0, 24) and codes.dtype == torch.int8 and scales.shape == (0, 1)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("dim", [96, 20480])
def test_codes_of_what_is_not_finite(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Such a row's codes say nothing: its scale is a NaN, and the rows beside it are as ever."""
    x = torch.randn(3, dim, generator=torch.Generator().manual_seed(7)).to(device)
    x[1, 5] = torch.inf
    weight = torch.ones(dim, device=device)
    scales = rms_norm_quantised(x, weight, EPS, dtype)[1]
    expected = reference.rms_norm_quantised(x, weight, EPS, dtype)[1]
    assert scales.isnan().tolist() == expected.isnan().tolist() == [[False], [True], [False]]
