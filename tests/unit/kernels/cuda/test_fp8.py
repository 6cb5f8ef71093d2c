"""Bytes of 8-bit numbers against torch's conversions."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels.cuda.fp8 import encode, format_of, has_instruction, largest_of

FLOATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def encode_all(x, out, BLOCK: tl.constexpr, FORMAT: tl.constexpr, INSTRUCTION: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, encode(tl.load(x + at), FORMAT, INSTRUCTION))


def encoded(x: torch.Tensor, dtype: torch.dtype, instruction: bool) -> torch.Tensor:
    out = torch.full((len(x),), 99, dtype=torch.uint8, device=x.device)
    encode_all[(len(x) // 256,)](x, out, BLOCK=256, FORMAT=format_of(dtype), INSTRUCTION=instruction)
    return out


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of a type, what is halfway between neighbours, and what is just beside that; float32."""
    own = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    own = own[own.isfinite()].sort().values
    halfway = (own[1:] + own[:-1]) / 2
    beside = [halfway.nextafter(torch.tensor(bound)) for bound in (torch.inf, -torch.inf)]
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e9, -1e9, 1e-30, -1e-30, 0.0, -0.0])
    return torch.cat((own, halfway, *beside, special, torch.zeros(3072)))[:2048]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("instruction", [False, True])
def test_floats_are_rounded_as_torch_does(dtype: torch.dtype, instruction: bool, device: torch.device) -> None:
    if instruction and not has_instruction(device):
        pytest.skip("the device has no such instruction")
    x = numbers(dtype)
    largest = torch.finfo(dtype).max
    assert largest == largest_of(format_of(dtype))
    expected = x.clamp(-largest, largest).to(dtype)
    got = encoded(x.to(device), dtype, instruction).cpu()
    nan = x.isnan()
    assert torch.equal(got[~nan], expected.view(torch.uint8)[~nan])
    assert got[nan].view(dtype).float().isnan().all()


def test_int8_is_rounded_to_even(device: torch.device) -> None:
    x = torch.cat((torch.arange(-130, 126) / 2, torch.arange(-256, 256).float()))
    got = encoded(x.to(device), torch.int8, False).cpu()
    assert torch.equal(got.view(torch.int8), x.round().clamp(-127, 127).to(torch.int8))


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        format_of(torch.float16)
