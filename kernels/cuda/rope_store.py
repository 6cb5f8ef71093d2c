"""Norms of heads, rotary and the write of keys and values in one Triton kernel; see kernels/rope_store.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.fp8 import encode, format_of, has_instruction
from kernels.cuda.norm import weighted
from kernels.cuda.pdl import is_wanted, prefetch_vector
from kernels.rotary import NEOX, RotaryStyle

FEW_TOKENS = 512
"""Up to here programs are as small as a warp can be, to be on many multiprocessors."""


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
    """`kernels.rope_store.rope_store`: q in place, keys and values into the pages; k and v stay as they are.

    The elements of a head are dense in q, k, v and the pages; head_dim: a multiple of 8.
    """
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0:
        return
    num_kv_heads, rotary_dim = k.shape[1], cos_sin_cache.shape[1]
    assert head_dim % 8 == 0 and rotary_dim % 2 == 0 and 0 < rotary_dim <= head_dim
    assert q.stride(2) == k.stride(2) == v.stride(2) == kv.stride(4) == 1, "the elements of a head must be dense"
    assert cos_sin_cache.stride(1) == 1 and (num_tokens == 1 or locations.stride(0) == 1)
    assert (positions.dim() == 1) == (style.axes is None)
    vectors = (style.axes, q_norm, k_norm)
    assert all(vector is None or vector.is_contiguous() for vector in vectors), "vectors must be dense"
    format = ""
    if kv.dtype.itemsize == 1:
        format, kv = format_of(kv.dtype), kv.view(torch.uint8)
        assert format != "int8", "int8 pages have scales of their own"
    heads, kv_heads, warps = rope_config(num_tokens, num_heads, num_kv_heads, head_dim)
    kv_page, kv_half, kv_token, kv_head, _ = kv.stride()
    groups = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, kv_heads)
    pdl = is_wanted(q)
    kernel: Any = rope_store_heads[(num_tokens * groups,)]
    kernel(
        q,
        k,
        v,
        positions,
        style.axes,
        cos_sin_cache,
        kv,
        locations,
        q_norm,
        k_norm,
        eps,
        k_scale,
        v_scale,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        positions.stride(0),
        positions.stride(-1),
        cos_sin_cache.stride(0),
        kv_page,
        kv_half,
        kv_token,
        kv_head,
        PAGE_SIZE=kv.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        HEADS=heads,
        KV_HEADS=kv_heads,
        INTERLEAVED=style.interleaved,
        SCALED=k_scale != 1.0 or v_scale != 1.0,
        FORMAT=format,
        INSTRUCTION=format != "" and has_instruction(q.device),
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )


def rope_config(num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Query heads of a program, key and value heads of one, warps: a thread has 16 elements of q, or of k and of v."""
    width = triton.next_power_of_2(head_dim)
    kv_width = triton.next_power_of_2(num_kv_heads) * width
    warps = 1 if num_tokens <= FEW_TOKENS else min(max(kv_width // 512, 1), 4)
    fitting = max(1, warps * 512 // width)
    heads, kv_heads = (min(fitting, triton.next_power_of_2(count)) for count in (num_heads, num_kv_heads))
    return heads, kv_heads, warps


@triton.jit
def _scaled(x, scale, SCALED: tl.constexpr):
    """What goes into the pages, before the conversion to their type."""
    wide = x.to(tl.float32)
    if SCALED:
        wide = tl.div_rn(wide, tl.zeros_like(wide) + scale)
    return wide


@triton.jit
def _store(to, x, scale, mask, SCALED: tl.constexpr, FORMAT: tl.constexpr, INSTRUCTION: tl.constexpr):
    wide = _scaled(x, scale, SCALED)
    if FORMAT == "":
        tl.store(to, wide.to(to.dtype.element_ty), mask=mask)
    else:
        tl.store(to, encode(wide, FORMAT, INSTRUCTION), mask=mask)


@triton.jit
def _norm_rotate_store(
    x,
    x_head,
    norm,
    to,
    to_head,
    first_head,
    cos_sin,
    cos_sin_stride,
    position,
    eps,
    scale,
    NUM_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    FORMAT: tl.constexpr,
    INSTRUCTION: tl.constexpr,
):
    """Heads first_head .. first_head + HEADS - 1 of a token, from x to `to`, which may be the same memory.

    The two elements of a pair are in the same place of two tensors. norm: weights or None; position: of the
    token, or `[1, pairs]` of each pair.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    heads = first_head + tl.arange(0, HEADS)[:, None]
    pairs = tl.broadcast_to(tl.arange(0, BLOCK)[None, :], [HEADS, BLOCK])
    mask = (heads < NUM_HEADS) & (pairs < HALF)
    if INTERLEAVED:
        elements = tl.arange(0, 2 * BLOCK)[None, :]
        both_mask = (heads < NUM_HEADS) & (elements < ROTARY_DIM)
        both = tl.load(x + heads * x_head + elements, mask=both_mask, other=0.0)
        first, second = tl.split(tl.reshape(both, [HEADS, BLOCK, 2]))
    else:
        first = tl.load(x + heads * x_head + pairs, mask=mask, other=0.0)
        second = tl.load(x + heads * x_head + HALF + pairs, mask=mask, other=0.0)
    if REST > 0:
        REST_BLOCK: tl.constexpr = triton.next_power_of_2(REST)
        others = ROTARY_DIM + tl.broadcast_to(tl.arange(0, REST_BLOCK)[None, :], [HEADS, REST_BLOCK])
        rest_mask = (heads < NUM_HEADS) & (others < HEAD_DIM)
        rest = tl.load(x + heads * x_head + others, mask=rest_mask, other=0.0)
    # Weights and angles are read for each head, so that they come in the heads' layout; the cache makes it cheap.
    if norm is not None:
        if INTERLEAVED:
            first_weight_at = norm + 2 * pairs
            second_weight_at = norm + 2 * pairs + 1
        else:
            first_weight_at = norm + pairs
            second_weight_at = norm + HALF + pairs
        first_weight = tl.load(first_weight_at, mask=pairs < HALF, other=0.0)
        second_weight = tl.load(second_weight_at, mask=pairs < HALF, other=0.0)
        if REST > 0:
            rest_weight = tl.load(norm + others, mask=others < HEAD_DIM, other=0.0)
    # Where the angles are depends on the position, which has to arrive before: all else is asked for by then. And where
    # there are more threads than elements, several read the same one, and all must before any writes it.
    tl.debug_barrier()
    angles = cos_sin + position * cos_sin_stride + pairs
    cos = tl.load(angles, mask=pairs < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=pairs < HALF, other=0.0)
    if norm is not None:
        wide, other_wide = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(wide * wide + other_wide * other_wide, axis=1, keep_dims=True)
        if REST > 0:
            rest_wide = rest.to(tl.float32)
            squares += tl.sum(rest_wide * rest_wide, axis=1, keep_dims=True)
        root = tl.rsqrt(squares * (1.0 / HEAD_DIM) + eps)
        first = weighted(first, root, first_weight)
        second = weighted(second, root, second_weight)
        if REST > 0:
            rest = weighted(rest, root, rest_weight)
    wide, other_wide = first.to(tl.float32), second.to(tl.float32)
    turned = (wide * cos - other_wide * sin).to(x.dtype.element_ty)
    other_turned = (other_wide * cos + wide * sin).to(x.dtype.element_ty)
    # Pages may have their heads outermost.
    to += heads.to(tl.int64) * to_head
    if INTERLEAVED:
        both = tl.reshape(tl.join(turned, other_turned), [HEADS, 2 * BLOCK])
        _store(to + elements, both, scale, both_mask, SCALED, FORMAT, INSTRUCTION)
    else:
        _store(to + pairs, turned, scale, mask, SCALED, FORMAT, INSTRUCTION)
        _store(to + HALF + pairs, other_turned, scale, mask, SCALED, FORMAT, INSTRUCTION)
    if REST > 0:
        _store(to + others, rest, scale, rest_mask, SCALED, FORMAT, INSTRUCTION)


@triton.jit(do_not_specialize=["position_axis"])
def rope_store_heads(
    q,
    k,
    v,
    positions,
    axes,
    cos_sin,
    kv,
    locations,
    q_norm,
    k_norm,
    eps,
    k_scale,
    v_scale,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    position_axis,
    position_token,
    cos_sin_stride,
    kv_page,
    kv_half,
    kv_token,
    kv_head,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    FORMAT: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token's heads: HEADS of q, or KV_HEADS of k and of v. Programs of a token are neighbours.

    `x_y` is the stride of x between two y. SCALED: any of the scales is not 1; FORMAT: of 8-bit pages, else empty.
    """
    if PDL:
        if q_norm is not None:
            prefetch_vector(q_norm, HEAD_DIM)
        if k_norm is not None:
            prefetch_vector(k_norm, HEAD_DIM)
        gdc_wait()
        gdc_launch_dependents()
    GROUPS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + KV_HEADS - 1) // KV_HEADS
    HALF: tl.constexpr = ROTARY_DIM // 2
    token = (tl.program_id(0) // (GROUPS + KV_GROUPS)).to(tl.int64)
    group = tl.program_id(0) % (GROUPS + KV_GROUPS)

    if axes is None:
        position = tl.load(positions + token * position_token)
    else:
        pairs = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
        axis = tl.load(axes + pairs, mask=pairs < HALF, other=0)
        position = tl.load(positions + axis * position_axis + token * position_token, mask=pairs < HALF, other=0)

    if group < GROUPS:
        q += token * q_token
        _norm_rotate_store(
            q,
            q_head,
            q_norm,
            q,
            q_head,
            group * HEADS,
            cos_sin,
            cos_sin_stride,
            position,
            eps,
            1.0,
            NUM_HEADS,
            HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            INTERLEAVED,
            False,
            "",
            False,
        )
    else:
        first_head = (group - GROUPS) * KV_HEADS
        location = tl.load(locations + token)
        keys = kv + location // PAGE_SIZE * kv_page + location % PAGE_SIZE * kv_token
        # Asked for before the keys' arithmetic.
        heads = first_head + tl.arange(0, KV_HEADS)[:, None]
        elements = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
        mask = (heads < NUM_KV_HEADS) & (elements < HEAD_DIM)
        values = tl.load(v + token * v_token + heads * v_head + elements, mask=mask, other=0.0)
        _norm_rotate_store(
            k + token * k_token,
            k_head,
            k_norm,
            keys,
            kv_head,
            first_head,
            cos_sin,
            cos_sin_stride,
            position,
            eps,
            k_scale,
            NUM_KV_HEADS,
            KV_HEADS,
            HEAD_DIM,
            ROTARY_DIM,
            INTERLEAVED,
            SCALED,
            FORMAT,
            INSTRUCTION,
        )
        _store(
            keys + kv_half + heads.to(tl.int64) * kv_head + elements, values, v_scale, mask, SCALED, FORMAT, INSTRUCTION
        )
