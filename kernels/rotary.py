"""Rotary position embedding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class RotaryStyle:
    """Which dimensions of a head are turned together, and by which position."""

    interleaved: bool = False
    """Dimension 2i pairs with 2i + 1 (GPT-J, GLM) rather than i with i + rotary_dim / 2 (NeoX halves)."""
    axes: Tensor | None = None
    """int64 `[rotary_dim / 2]`: which of a token's positions turns each pair (Qwen2-VL's mRoPE, whether its sections
    are blocks or interleaved); None where a token has one position."""


NEOX = RotaryStyle()
"""Halves, one position."""


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, style: RotaryStyle = NEOX) -> None:
    """Rotate q and k in place by their positions.

    q: `[num_tokens, num_heads, head_dim]`, k: `[num_tokens, num_kv_heads, head_dim]`, any strides with the last
    dimension dense; positions: int64 `[num_tokens]`, or `[axes, num_tokens]` where the style has axes; cos_sin_cache:
    float32 `[max_position, rotary_dim]`, cosines in the first half of a row and sines in the second. Dimensions from
    rotary_dim on stay as they are. Computed in float32. Source: Su et al., "RoFormer", 2021; several axes: Wang et al.,
    "Qwen2-VL", 2024.
    """
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = _angles(positions, cos_sin_cache, style.axes)
    for heads in (q, k):
        turning = heads[..., :rotary_dim]
        if style.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        else:
            first, second = turning.chunk(2, dim=-1)
        _rotate(first, second, cos, sin)


def _angles(positions: Tensor, cos_sin_cache: Tensor, axes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[num_tokens, 1, rotary_dim / 2]`."""
    if axes is None:
        rows = cos_sin_cache.index_select(0, positions)
    else:
        of_axes = cos_sin_cache[positions]
        picked = axes.repeat(2).view(1, 1, -1).expand(1, of_axes.shape[1], -1)
        rows = of_axes.gather(0, picked).squeeze(0)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def _rotate(first: Tensor, second: Tensor, cos: Tensor, sin: Tensor) -> None:
    wide_first, wide_second = first.float(), second.float()
    rotated_first = wide_first * cos - wide_second * sin
    second.copy_(wide_second * cos + wide_first * sin)
    first.copy_(rotated_first)
