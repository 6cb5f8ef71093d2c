"""Rows of activations side by side, or added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def concat(parts: Sequence[Tensor]) -> Tensor:
    """`[num_tokens, dims together]` from `[num_tokens, dim]` each, of one dtype; a new tensor, of a single part too."""
    return torch.cat(tuple(parts), dim=-1)


def add_rows(x: Tensor, total: Tensor) -> Tensor:
    """`x + total`, both `[num_tokens, dim]`; it may take the place of `total`."""
    return total.add_(x)
