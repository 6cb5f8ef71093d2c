"""8-bit codes as bytes: what the CUDA kernels that store them share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FORMATS = ((torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2"), (torch.int8, "int8"))


def format_of(dtype: torch.dtype) -> str:
    """What `encode` calls an 8-bit dtype."""
    for known, name in FORMATS:
        if dtype == known:
            return name
    raise ValueError(f"no 8-bit codes of {dtype}")


def has_instruction(device: torch.device) -> bool:
    """Whether a device converts to 8-bit floats by an instruction (compute capability 8.9 and on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@triton.constexpr_function
def largest_of(format):
    """The largest number of a format."""
    return {"e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}[format]


@triton.constexpr_function
def _mantissa_bits(format):
    return {"e4m3": 3, "e5m2": 2}[format]


@triton.constexpr_function
def _exponent_bias(format):
    return {"e4m3": 7, "e5m2": 15}[format]


@triton.jit
def encode(x, FORMAT: tl.constexpr, INSTRUCTION: tl.constexpr):
    """float32 to bytes of the nearest number, ties to even; what is out of the format's range becomes its largest.

    A NaN stays one in the float formats. INSTRUCTION: see `has_instruction`.
    """
    LARGEST: tl.constexpr = largest_of(FORMAT)
    x = tl.clamp(x, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if FORMAT == "int8":
        # A float32 of this magnitude has no bits for a fraction, so that the sum is rounded to an integer.
        codes = ((x + 12582912.0) - 12582912.0).to(tl.int8).to(tl.uint8, bitcast=True)
    elif not INSTRUCTION:
        codes = _encode_by_bits(x, FORMAT)
    elif FORMAT == "e4m3":
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    return codes


@triton.jit
def _encode_by_bits(x, FORMAT: tl.constexpr):
    """`encode` to a float format of what is in its range."""
    MANTISSA: tl.constexpr = _mantissa_bits(FORMAT)
    BIAS: tl.constexpr = _exponent_bias(FORMAT)
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Below the smallest normal number codes count steps, of which this is the float32 whose last bit is one.
    STEPS: tl.constexpr = (127 + 24 - BIAS - MANTISSA) << 23
    steps = tl.full(x.shape, STEPS, tl.int32).to(tl.float32, bitcast=True)
    subnormal = (tl.abs(x) + steps).to(tl.int32, bitcast=True) - STEPS
    codes = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    codes = tl.where(magnitude > 0x7F800000, 0x7F, codes)
    return (codes | ((bits >> 24) & 0x80)).to(tl.uint8)
