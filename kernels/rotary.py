"""Rotary position embedding."""

from __future__ import annotations

from torch import Tensor


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> None:
    """Rotate q and k in place by their positions; dimension i pairs with i + rotary_dim / 2 (NeoX halves).

    q: `[num_tokens, num_heads, head_dim]`, k: `[num_tokens, num_kv_heads, head_dim]`, any strides with the last
    dimension dense; positions: int64 `[num_tokens]`; cos_sin_cache: float32 `[max_position, rotary_dim]`, cosines in
    the first half of a row and sines in the second. Dimensions from rotary_dim on stay as they are. Computed in
    float32. Source: Su et al., "RoFormer", 2021.
    """
    rotary_dim = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    for heads in (q, k):
        _rotate(heads, cos, sin, rotary_dim // 2)


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, half: int) -> None:
    first, second = heads[..., :half], heads[..., half : 2 * half]
    wide_first, wide_second = first.float(), second.float()
    rotated_first = wide_first * cos - wide_second * sin
    second.copy_(wide_second * cos + wide_first * sin)
    first.copy_(rotated_first)
