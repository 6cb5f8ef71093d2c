"""Operations on packed weights in torch: what the CPU kernels are held against.

Activation rows are int8 in groups of 16 columns, each with a scale, as src/packing.h lays them out: x = code * scale,
scale = max|x| / 127 of the group, NaN where one of the group is not finite. Groups whose largest value exceeds
FINE_FROM times the row's root mean square are kept in 16 bits: what rounding left of them is rounded once more, with
1 / 254 of the scale.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.matrix import BLOCK, FINE_BYTES, GROUP, PackedLinear, PackedMatrix, activation_bytes
from kernels.norm import rms_norm

FINE_FROM = 5.0
"""Times the root mean square of a row."""


def quantise_rows(x: Tensor) -> Tensor:
    """float32 `[num_tokens, dim]` as activation rows: uint8 `[num_tokens, activation_bytes(dim)]`."""
    num_tokens, dim = x.shape
    blocks = -(-dim // BLOCK)
    groups = F.pad(x, (0, blocks * BLOCK - dim)).view(num_tokens, 2 * blocks, GROUP)
    most = groups.abs().amax(-1, keepdim=True)
    finite = most.isfinite()
    scales = torch.where(finite, most / 127.0, torch.nan)
    codes = torch.where(finite, groups * torch.where(most > 1e-30, 127.0 / most, 0.0), 0.0).round()
    fine_from = FINE_FROM * x.square().mean(-1).sqrt()
    is_fine = (most.squeeze(-1) > fine_from.unsqueeze(1).clamp(min=1e-30)) & finite.squeeze(-1)
    fine_scales = scales / 254.0
    fine_codes = ((groups - codes * scales) / fine_scales).round()
    out = torch.zeros(num_tokens, activation_bytes(dim), dtype=torch.uint8)
    parts = _coarse_parts(codes, scales.squeeze(-1))
    out[:, : blocks * (BLOCK + 20)] = torch.cat([_bytes(part) for part in parts], dim=1)
    start = _fine_start(blocks)
    out[:, start : start + 8] = _bytes(is_fine.sum(1, keepdim=True))
    for row in range(num_tokens):
        picked = is_fine[row].nonzero()
        if not len(picked):
            continue
        own_codes, own_scales = fine_codes[row, picked[:, 0]], fine_scales[row, picked[:, 0]]
        sums = own_codes.sum(-1, keepdim=True)
        entry = (picked.to(torch.int32), -sums.to(torch.int32), own_scales, own_scales * sums, own_codes.to(torch.int8))
        packed = torch.cat([_bytes(part) for part in entry], dim=1).flatten()
        out[row, start + 8 : start + 8 + len(packed)] = packed
    return out


def dequantise_rows(rows: Tensor, dim: int) -> Tensor:
    """float32 `[num_tokens, dim]`: what activation rows stand for."""
    blocks = -(-dim // BLOCK)
    codes = rows[:, : blocks * BLOCK].contiguous().view(torch.int8).float()
    scales = rows[:, blocks * BLOCK : blocks * (BLOCK + 8)].contiguous().view(torch.float32)
    groups = codes.view(-1, 2 * blocks, GROUP) * scales.unsqueeze(-1)
    start = _fine_start(blocks)
    counts = rows[:, start : start + 8].contiguous().view(torch.int64).flatten().tolist()
    for row, count in enumerate(counts):
        entries = rows[row, start + 8 : start + 8 + count * FINE_BYTES].view(count, FINE_BYTES)
        which = entries[:, :4].contiguous().view(torch.int32).flatten().long()
        fine_scales = entries[:, 8:12].contiguous().view(torch.float32)
        groups[row, which] += entries[:, FINE_BYTES - GROUP :].contiguous().view(torch.int8).float() * fine_scales
    return groups.view(len(rows), -1)[:, :dim]


def _coarse_parts(codes: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    counts = codes.sum(-1)
    sums = (scales * counts).view(len(codes), -1, 2).sum(-1)
    return codes.to(torch.int8), scales, sums, -counts.to(torch.int32)


def _bytes(part: Tensor) -> Tensor:
    # A dimension of size 1 may have any stride, and view wants the last to be dense.
    return part.reshape(len(part), -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _fine_start(blocks: int) -> int:
    return -(-blocks * (BLOCK + 20) // 8) * 8


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` as activation rows."""
    return quantise_rows(rms_norm(x, weight, eps))


def add_norm_rows(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` with the normalised half as activation rows; x + residual stays float32."""
    total = residual + x
    return norm_rows(total, weight, eps), total


def packed_embed(table: PackedMatrix, ids: Tensor) -> Tensor:
    """Rows of a packed table: float32 `[num_tokens, table.cols]`; ids: int64 `[num_tokens]`."""
    return table.dequantise().index_select(0, ids)


def packed_linear(layer: PackedLinear, x: Tensor) -> Tensor:
    """`x @ W.T + bias` for activation rows x; float32 `[num_tokens, the matrices' rows together]`."""
    wide = dequantise_rows(x, layer.in_dim)
    out = torch.cat([F.linear(wide, matrix.dequantise()) for matrix in layer.matrices], dim=1)
    return out if layer.bias is None else out.add_(layer.bias)


def packed_gated_linear(layer: PackedLinear, x: Tensor) -> Tensor:
    """`silu(gate) * up` as activation rows, where the layer's two matrices (of equal size) are gate and up."""
    gate, up = packed_linear(layer, x).chunk(2, dim=1)
    return quantise_rows(F.silu(gate) * up)
