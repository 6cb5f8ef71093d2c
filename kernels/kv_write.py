"""Writing the keys and values of a step into their pages."""

from __future__ import annotations

from torch import Tensor


def write_kv(kv: Tensor, k: Tensor, v: Tensor, locations: Tensor) -> None:
    """Store the keys and values of a step's tokens in one layer's pages.

    kv: `[num_pages, 2, page_size, num_kv_heads, head_dim]`, any strides, keys at index 0 of the second dimension;
    k, v: `[num_tokens, num_kv_heads, head_dim]`; locations: int64 `[num_tokens]`, `page * page_size + offset`, each at
    most once. Values are converted to the dtype of kv.
    """
    page_size = kv.shape[2]
    pages = locations.div(page_size, rounding_mode="floor")
    offsets = locations - pages * page_size
    # index_put_ on the two halves honours every stride layout and costs no more than a flat copy.
    kv[:, 0].index_put_((pages, offsets), k.to(kv.dtype))
    kv[:, 1].index_put_((pages, offsets), v.to(kv.dtype))
