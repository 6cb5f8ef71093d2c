"""Norms of heads, rotary and the write of keys and values by the CPU kernels, in one op."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.abi import RopeStoreArgs
from kernels.cpu.attention import kv_pages
from kernels.cpu.native import emit
from kernels.rotary import NEOX, RotaryStyle


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
    """`kernels.rope_store.rope_store` in float32: q in place, keys and values into the pages; k and v stay as they are.

    q, k, v: views of one `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`; num_heads may be 0. Into int8
    pages a head goes as `round(x / scale)` and `scale = max|x| / 127`. Rotates halves by one position only, and knows
    no scales of pages.
    """
    assert not style.interleaved and style.axes is None and k_scale == v_scale == 1.0
    num_tokens, num_heads, head_dim = q.shape
    assert q.dtype == k.dtype == v.dtype == torch.float32
    views = (q, k, v) if num_heads else (k, v)
    # A single token's stride is anything: nobody steps over it.
    assert num_tokens == 1 or len({view.stride(0) for view in views}) == 1, "views of one fused projection"
    assert all(view.stride()[1:] == (head_dim, 1) for view in views), "heads of a token must be dense"
    assert num_tokens == 1 or positions.stride() == locations.stride() == (1,), "positions and locations must be dense"
    assert head_dim % 8 == 0 and head_dim <= 256, head_dim
    args = RopeStoreArgs(
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        token_stride=k.stride(0),
        num_heads=num_heads,
        num_kv_heads=k.shape[1],
        head_dim=head_dim,
        q_norm=None if q_norm is None else q_norm.data_ptr(),
        k_norm=None if k_norm is None else k_norm.data_ptr(),
        eps=eps,
        positions=positions.data_ptr(),
        locations=locations.data_ptr(),
        cos_sin=cos_sin_cache.data_ptr(),
        rotary_dim=cos_sin_cache.shape[1],
        kv=kv_pages(kv),
    )
    emit(args, num_tokens)
