"""The dense product, and looking up rows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kernels.activation import silu_and_mul


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`. x: `[num_tokens, in_dim]`; weight: `[out_dim, in_dim]`; bias: `[out_dim]` or None."""
    return F.linear(x, weight, bias)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`silu(gate) * up`, where gate and up are the halves of `linear`'s result: `[num_tokens, out_dim / 2]`."""
    return silu_and_mul(linear(x, weight, bias))


def embed(table: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table. table: `[vocab, dim]`; ids: int64 `[num_tokens]`; returns `[num_tokens, dim]`."""
    return table.index_select(0, ids)
