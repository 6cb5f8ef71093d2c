"""Writing the keys and values of a step into their pages."""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(kv: Tensor, k: Tensor, v: Tensor, locations: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    """Store the keys and values of a step's tokens in one layer's pages.

    kv: `[num_pages, 2, page_size, num_kv_heads, head_dim]`, any strides, keys at index 0 of the second dimension;
    k, v: `[num_tokens, num_kv_heads, head_dim]`; locations: int64 `[num_tokens]`, `page * page_size + offset`, each at
    most once. Keys are divided by k_scale, values by v_scale, and both converted to the dtype of kv; what is beyond an
    8-bit float's range becomes its largest number.
    """
    page_size = kv.shape[2]
    pages = locations.div(page_size, rounding_mode="floor")
    offsets = locations - pages * page_size
    # index_put_ on the two halves honours every stride layout and costs no more than a flat copy.
    for half, (values, scale) in enumerate(((k, k_scale), (v, v_scale))):
        stored = _converted(values, scale, kv.dtype)
        if kv.dtype.itemsize > 1:
            kv[:, half].index_put_((pages, offsets), stored)
        else:
            # Not every device indexes 8-bit floats.
            kv[:, half].view(torch.uint8).index_put_((pages, offsets), stored.view(torch.uint8))


def _converted(values: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if scale != 1.0:
        values = values.float() / scale
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return values.float().clamp(-largest, largest).to(dtype)
