"""How the attention kernel is compiled and cut up, by kind of tile; where several compete, the tuner measures them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_KB = 1024
_UNLIMITED = 1 << 30
# Elements of parts that each warp merges at a time: 32 registers a thread, no more than the loop over keys needs.
_MERGED_BY_WARP = 1024

Loops = Literal["never", "trees", "always"]


@dataclass(frozen=True)
class TileConfig:
    """Of one kind of tile."""

    block_n: int
    """Keys of a tile; a power of two, 16 at least."""
    num_warps: int
    num_stages: int
    programs: int
    """How many programs a multiprocessor should get by splitting contexts, where a step has fewer rows than that."""
    min_split: int
    """Keys that a split has at least."""
    max_split: int
    """Keys above which a row is split though the device is full, so that the others do not end long before it."""
    two_loops: Loops
    """For which steps tiles of keys that every token sees are gone through apart, without masks."""


def kernel_constants(
    config: TileConfig,
    *,
    group: int,
    head_dim: int,
    page_size: int,
    lanes: int,
    part: int,
    longest: int,
    is_float32: bool,
    has_tree: bool,
    has_window: bool,
    has_softcap: bool,
) -> dict[str, int | bool | str]:
    """The `tl.constexpr` arguments of `attention_kernel.attend`; longest: most tokens of a row, is_float32: q."""
    width = padded(head_dim)
    used = min(lanes, _power_of_two(min(lanes // group, longest) * group))
    merged = _MERGED_BY_WARP * config.num_warps
    columns = min(width, max(16, merged // used))
    return {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "PAGE_SIZE": page_size,
        "BLOCK_M": lanes,
        "BLOCK_N": config.block_n,
        "USED": used,
        "COLUMNS": columns,
        "AT_ONCE": max(1, min(16, merged // (used * columns))),
        "PART": part,
        "TREE": has_tree,
        "WINDOW": has_window,
        "SOFTCAP": has_softcap,
        "TWO_LOOPS": config.two_loops == "always" or (has_tree and config.two_loops == "trees"),
        "PRECISION": "ieee" if is_float32 else "tf32",
    }


def padded(head_dim: int) -> int:
    """What the kernel takes a head's dimension for."""
    return max(16, _power_of_two(head_dim))


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def decode_configs(head_dim: int, kv_itemsize: int) -> dict[str, TileConfig]:
    """Candidates for tiles of single tokens; the first is the default.

    head_dim: as `padded`; kv_itemsize: bytes of an element of the pages, or of q if that is float32.
    """
    # No second loop but for trees: single tokens wait for memory, not for masks, and it would fill the pipeline anew.
    if kv_itemsize == 4:
        return {"plain": TileConfig(16, 4, 2, 2, 128, 2048, "trees")}
    # Bytes of keys and values in flight are what counts: a tile of either size, and how many of them. Converting from
    # 8 bits takes registers.
    pair_bytes = 2 * head_dim * kv_itemsize
    large = _keys_within(32 * _KB, pair_bytes, 128 if kv_itemsize > 1 else 8192 // head_dim)
    small = _keys_within(16 * _KB, pair_bytes, large // 2)
    deep = 4 if kv_itemsize > 1 else 6
    return {
        "large": TileConfig(large, 4, 3, 2, 128, 2048, "trees"),
        "large_split": TileConfig(large, 4, 3, 4, 64, 1024, "trees"),
        "small": TileConfig(small, 4, deep, 3, 128, 2048, "trees"),
        "small_split": TileConfig(small, 4, deep, 6, 64, 1024, "trees"),
    }


def draft_configs(head_dim: int, kv_itemsize: int) -> dict[str, TileConfig]:
    """The same for tiles of a few drafted tokens."""
    if kv_itemsize == 4:
        return {"plain": TileConfig(16, 8, 2, 1, 128, 2048, "always")}
    num_warps = 8 if head_dim * kv_itemsize >= 256 else 4
    if head_dim > 128:
        return {
            "even": TileConfig(32, num_warps, 3, 2, 128, 2048, "always"),
            "frugal": TileConfig(16, num_warps, 2, 2, 128, 2048, "always"),
        }
    return {
        "even": TileConfig(32, num_warps, 3, 2, 128, 2048, "always"),
        "deep": TileConfig(32, num_warps, 4, 2, 256, 2048, "always"),
    }


def prefill_configs(head_dim: int, kv_itemsize: int) -> dict[str, TileConfig]:
    """The same for the tiles of prompts."""
    if kv_itemsize == 4:
        return {"plain": TileConfig(16, 8, 2, 1, 512, _UNLIMITED, "always")}
    if head_dim > 128:
        # The second is for devices with less shared memory than an H100's.
        return {
            "even": TileConfig(32, 8, 3, 1, 512, _UNLIMITED, "always"),
            "frugal": TileConfig(16, 8, 2, 1, 512, _UNLIMITED, "always"),
        }
    return {
        "even": TileConfig(64, 8, 3, 1, 512, _UNLIMITED, "always"),
        "deep": TileConfig(64, 8, 4, 1, 512, _UNLIMITED, "always"),
        "small": TileConfig(32, 8, 4, 1, 512, _UNLIMITED, "always"),
        "large": TileConfig(128, 8, 3, 1, 512, _UNLIMITED, "always"),
    }


def fixed_config(head_dim: int, kv_itemsize: int, shared_bytes: int) -> TileConfig:
    """The same where one configuration has to do for all rows. Contexts are not split, and all tiles of keys are gone
    through in one loop, so in their order. shared_bytes: what a program may have of shared memory.
    """
    if kv_itemsize == 4:
        return TileConfig(16, 4 if head_dim <= 128 else 8, 2, 1, _UNLIMITED, _UNLIMITED, "never")
    # How many tiles are on their way changes no result.
    stages = 3 if shared_bytes >= 160 * _KB else 2
    return TileConfig(64 if head_dim <= 128 else 32, 4, stages, 1, _UNLIMITED, _UNLIMITED, "never")


def _keys_within(size_bytes: int, pair_bytes: int, most: int) -> int:
    return max(32, min(most, size_bytes // pair_bytes))
