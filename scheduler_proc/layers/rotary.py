"""Rotary frequencies of every scaling kind, and the table of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.model_files.types import RopeConfig


def cos_sin_cache(rope: RopeConfig, rotary_dim: int, max_position: int, device: torch.device) -> Tensor:
    """Cosines then sines of every position's angles: float32 `[max_position, rotary_dim]`.

    The angles are products of float32 position and frequency, as checkpoints' reference code computes them.
    """
    frequencies, scale = frequencies_and_scale(rope, rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos().mul_(scale), angles.sin().mul_(scale)), dim=-1).to(device)


def frequencies_and_scale(rope: RopeConfig, rotary_dim: int) -> tuple[Tensor, float]:
    """Angular frequencies, float32 `[rotary_dim / 2]` in radians per token, and the factor on cosines and sines.

    Kinds: `default` (Su et al., 2021); `linear` (positions divided by factor, Chen et al., 2023); `dynamic` (NTK-aware;
    up to the original context, which is all this engine serves, the same as default); `llama3` (Llama 3.1's wavelength
    bands); `yarn` (Peng et al., 2023); `factors` (an explicit divisor per frequency). Raises ModelFileError if the
    fields that a kind needs are missing or contradict rotary_dim.
    """
    frequencies = 1.0 / _periods(rope, rotary_dim)
    match rope.kind:
        case "default" | "dynamic":
            return frequencies, 1.0
        case "linear":
            return frequencies / rope.factor, 1.0
        case "llama3":
            return _llama3(rope, frequencies), 1.0
        case "yarn":
            return _yarn(rope, rotary_dim), _yarn_scale(rope)
        case "factors":
            if len(rope.factors) != rotary_dim // 2:
                raise ModelFileError(f"rope: {len(rope.factors)} frequency factors given, {rotary_dim // 2} needed")
            return frequencies / torch.tensor(rope.factors, dtype=torch.float32), 1.0


def _periods(rope: RopeConfig, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return rope.theta**exponents


def _original_context(rope: RopeConfig) -> int:
    if rope.original_max_position <= 0:
        raise ModelFileError(f"rope: kind {rope.kind} needs original_max_position_embeddings")
    return rope.original_max_position


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    context = _original_context(rope)
    turns = context * frequencies / (2 * math.pi)
    # Below low_freq_factor turns in the trained context: divided; above high_freq_factor: kept; between: blended.
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeConfig, rotary_dim: int) -> Tensor:
    context = _original_context(rope)

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = float(math.floor(low)), float(math.ceil(high))
    low, high = max(low, 0.0), min(high, float(rotary_dim - 1))
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    periods = _periods(rope, rotary_dim)
    return ramp / (rope.factor * periods) + (1 - ramp) / periods


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale_of(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale_of(rope.mscale) / scale_of(rope.mscale_all_dim)
    return scale_of(1.0)
