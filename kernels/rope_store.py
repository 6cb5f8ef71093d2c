"""What happens to a layer's queries, keys and values before attention, as one operation."""

from __future__ import annotations

from torch import Tensor

from kernels.kv_write import write_kv
from kernels.norm import rms_norm
from kernels.rotary import NEOX, RotaryStyle, rope


def rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv: Tensor,
    locations: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    style: RotaryStyle = NEOX,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Norm query and key heads (where there are weights), rotate both, store keys and values in the pages.

    q: `[num_tokens, num_heads, head_dim]`, changed in place; k, v: `[num_tokens, num_kv_heads, head_dim]`, k may be
    left changed; q_norm, k_norm: `[head_dim]`. The rest as in `rms_norm`, `rope` and `write_kv`.
    """
    if q_norm is not None:
        q.copy_(rms_norm(q, q_norm, eps))
    if k_norm is not None:
        k = rms_norm(k, k_norm, eps)
    rope(q, k, positions, cos_sin_cache, style)
    write_kv(kv, k, v, locations, k_scale, v_scale)
