"""Paged attention in Triton with the same bits for a token whatever else is in the step."""

from __future__ import annotations

from kernels.cuda.attention import PagedAttention
from kernels.cuda.attention_config import TileConfig, fixed_config
from kernels.cuda.attention_plan import Launch, fixed_lanes
from kernels.cuda.context import Context


class FixedAttention(PagedAttention):
    """`kernels.attention.paged_attention`, where a token's result depends on nothing but its query and its context.

    All rows are cut into tiles of one shape, so that one instruction multiplies. Tiles of keys begin at multiples of
    their length, contexts are never split, and prefixes are not shared: the sum of a token runs over the same keys in
    the same order whether it is decoded or part of a prompt, and a tile that it does not see leaves it as it is.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context, splits=1, min_saved=None)

    def _lanes_of_kind(self, group: int, is_float32: bool) -> tuple[int, ...]:
        return fixed_lanes(group, is_float32)

    def _candidates(self, launch: Launch, head_dim: int, itemsize: int) -> tuple[str, dict[str, TileConfig]]:
        return "fixed_attention", {"fixed": fixed_config(head_dim, itemsize, self._shared_bytes)}
