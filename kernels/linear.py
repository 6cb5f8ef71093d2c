"""The dense product."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`. x: `[num_tokens, in_dim]`; weight: `[out_dim, in_dim]`; bias: `[out_dim]` or None."""
    return F.linear(x, weight, bias)
