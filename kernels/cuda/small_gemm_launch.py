"""The configurations of the kernels in small_gemm.py and tile_gemm.py, which are worth a trial, and their launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.cuda.small_gemm import strip_kernel, vector_kernel
from kernels.cuda.tile_gemm import tile_kernel

MAX_TOKENS = 128
"""The kernels take no more rows of activations than this."""

TOKEN_CLASSES = (1, 8, 16, 32, 64, 128)

DTYPES = (torch.bfloat16, torch.float16)
"""What the kernels' tensor cores multiply."""

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200; the rules for what is not measured are made for it."""

MAX_PARTS = 8
"""Of a sum that several programs share."""

MOST_GATED_ROWS = 128
"""Of a program, gates and ups, that adds up parts."""

# What a launch takes beside the kernel's arguments is in no type.
_strip: Any = strip_kernel
_vector: Any = vector_kernel
_tile: Any = tile_kernel


class Config(Protocol):
    """One kernel with its sizes."""

    def launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tickets: Tensor, *, gated: bool, pdl: bool
    ) -> None:
        """Fill out `[num_tokens, results]`. gated: weight has `2 * results` rows, gate's before up's; else `results`.

        tickets: as in Context. pdl: launched so that it may begin, with loads of weights, before the kernel before it
        has ended.
        """
        ...


@dataclass(frozen=True)
class Strip:
    """A program takes `rows` rows of the weights and all tokens; its warps share the reduction's dimension."""

    rows: int
    warps: int
    unroll: int
    """Of 64 bytes of a row in a warp's tile."""
    max_registers: int
    """Of a thread. The compiler, left alone, saves registers and mixes loads with the products that wait for them; told
    a limit it issues all loads first. So the limit is part of what makes this fast. Where in_dim needs masks, a few
    more are allowed."""
    ahead: int = 0
    """Columns of the weights to bring into the cache before the kernel before has ended, beyond the first tiles."""

    def launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tickets: Tensor, *, gated: bool, pdl: bool
    ) -> None:
        """See Config."""
        num_tokens, in_dim = x.shape
        results = out.shape[1]
        even = in_dim % (self.warps * self.unroll * 32) == 0
        _strip[(_parts(results, self.rows // 2 if gated else self.rows),)](
            x,
            weight,
            bias,
            out,
            num_tokens,
            results,
            in_dim,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            TOKENS=padded_tokens(num_tokens),
            ROWS=self.rows,
            WARPS=self.warps,
            UNROLL=self.unroll,
            EVEN=even,
            GATED=gated,
            PDL=pdl,
            AHEAD=_ahead(self.ahead, weight) if pdl else 0,
            num_warps=self.warps,
            num_stages=1,
            maxnreg=self.limit(even=even),
            launch_pdl=pdl,
        )

    def limit(self, *, even: bool) -> int:
        """The registers of a thread; even: in_dim is a multiple of a tile's."""
        return self.max_registers if even else max(self.max_registers, 96)


@dataclass(frozen=True)
class Vector:
    """For one token: a program takes `rows` rows of the weights; a tile of them has 8 columns for each thread."""

    rows: int
    warps: int
    tiles: int
    """Of weights on their way at any time: 1 or 2."""
    max_registers: int
    """Of a thread: decides how many programs a multiprocessor has. Where in_dim needs masks, more are allowed."""
    ahead: int = 0
    """As in Strip."""

    @property
    def width(self) -> int:
        """Of a tile, in columns of the weights."""
        return self.warps * 256

    def launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tickets: Tensor, *, gated: bool, pdl: bool
    ) -> None:
        """See Config; num_tokens is 1."""
        assert x.shape[0] == 1, "this kernel is for one token"
        in_dim = x.shape[1]
        results = out.shape[1]
        even = in_dim % (self.tiles * self.width) == 0
        _vector[(_parts(results, self.rows // 2 if gated else self.rows),)](
            x,
            weight,
            bias,
            out,
            results,
            in_dim,
            weight.stride(0),
            ROWS=self.rows,
            WIDTH=self.width,
            TILES=self.tiles,
            EVEN=even,
            GATED=gated,
            PDL=pdl,
            AHEAD=_ahead(self.ahead, weight) if pdl else 0,
            num_warps=self.warps,
            num_stages=1,
            maxnreg=self.limit(even=even),
            launch_pdl=pdl,
        )

    def limit(self, *, even: bool) -> int:
        """The registers of a thread; even: in_dim is a multiple of what is on its way."""
        return self.max_registers if even else self.max_registers + 24


@dataclass(frozen=True)
class Tile:
    """A program takes `rows` rows of the weights, some part of their columns, and all tokens."""

    rows: int
    depth: int
    """Columns of a tile."""
    stages: int
    """Tiles in shared memory; from 64 rows on one of them is in use, the others are on their way."""
    warps: int
    programs: int
    """Of a multiprocessor: in_dim is cut into parts until there are as many. They fit, for the tokens of the table."""
    ahead: int
    """As in Strip, first tiles included."""

    def launch(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tickets: Tensor, *, gated: bool, pdl: bool
    ) -> None:
        """See Config."""
        num_tokens, in_dim = x.shape
        results = out.shape[1]
        num_tiles = _parts(results, self.rows // 2 if gated else self.rows)
        num_parts = self.parts(num_tiles, in_dim, gated=gated)
        tokens = max(padded_tokens(num_tokens), 16)
        scratch = None
        if num_parts > 1:
            assert num_tiles <= tickets.shape[0], num_tiles
            scratch = torch.empty(num_tiles * num_parts * self.rows * tokens, dtype=torch.float32, device=x.device)
        even = in_dim % self.depth == 0
        _tile[(num_tiles, num_parts)](
            x,
            weight,
            bias,
            out,
            scratch,
            None if scratch is None else tickets,
            num_tokens,
            results,
            in_dim,
            x.stride(0),
            weight.stride(0),
            out.stride(0),
            TOKENS=tokens,
            ROWS=self.rows,
            DEPTH=self.depth,
            PARTS=num_parts,
            EVEN=even,
            GATED=gated,
            PDL=pdl,
            AHEAD=_ahead(self.ahead, weight) if pdl else 0,
            num_warps=self.warps,
            num_stages=self.stages,
            launch_pdl=pdl,
        )

    def parts(self, num_tiles: int, in_dim: int, *, gated: bool = False) -> int:
        """Of in_dim, for one program each: few, as all are added, and each worth filling the shared memory.

        A power of two, as the kernel is compiled for each number. One where a gate leaves no registers for adding.
        """
        if gated and self.rows > MOST_GATED_ROWS:
            return 1
        wanted = min(self.programs * NUM_MULTIPROCESSORS // num_tiles, in_dim // (self.depth * self.stages), MAX_PARTS)
        return 1 << wanted.bit_length() - 1 if wanted > 1 else 1


def _parts(whole: int, part: int) -> int:
    # triton.cdiv costs microseconds.
    return -(-whole // part)


def _ahead(columns: int, weight: Tensor) -> int:
    """As many columns, or 0 where rows are not what `fetch_ahead` must have."""
    fit = weight.shape[1] >= 128 and weight.shape[1] % 8 == 0
    aligned = weight.stride(0) % 8 == 0 and weight.data_ptr() % 16 == 0
    return columns if fit and aligned else 0


def padded_tokens(num_tokens: int) -> int:
    """The number of tokens that the kernel is compiled for: 8, 16, 32, 64 or 128."""
    assert 0 < num_tokens <= MAX_TOKENS, num_tokens
    return max(8, 1 << (num_tokens - 1).bit_length())


def token_class(num_tokens: int) -> int:
    """The largest number of tokens that shares a choice of configuration with this one: one of TOKEN_CLASSES."""
    return 1 if num_tokens == 1 else padded_tokens(num_tokens)


_CONFIGS: Mapping[int, Mapping[str, Config]] = {
    1: {
        "vector2x2x2": Vector(2, 2, 2, 56),
        "vector2x4x2": Vector(2, 4, 2, 56),
        "vector2x8x2a": Vector(2, 8, 2, 56, ahead=2048),
        "vector4x2x2": Vector(4, 2, 2, 104),
        "vector4x4x1a": Vector(4, 4, 1, 56, ahead=2048),
        "vector4x4x2": Vector(4, 4, 2, 104),
        "vector4x8x1": Vector(4, 8, 1, 64),
    },
    8: {
        "strip8x8x2": Strip(8, 8, 2, 80),
        "strip16x8x2": Strip(16, 8, 2, 128),
        "strip16x4x2a": Strip(16, 4, 2, 128, ahead=2048),
        "tile64x64x5": Tile(64, 64, 5, 4, programs=4, ahead=256),
        "tile64x128x3": Tile(64, 128, 3, 4, programs=3, ahead=256),
        "tile64x128x5": Tile(64, 128, 5, 4, programs=2, ahead=512),
        "tile64x128x8": Tile(64, 128, 8, 4, programs=1, ahead=1024),
    },
    16: {
        "tile32x128x6": Tile(32, 128, 6, 4, programs=3, ahead=512),
        "tile64x64x5": Tile(64, 64, 5, 4, programs=4, ahead=256),
        "tile64x128x3": Tile(64, 128, 3, 4, programs=3, ahead=256),
        "tile64x128x5": Tile(64, 128, 5, 4, programs=2, ahead=512),
        "tile64x128x8": Tile(64, 128, 8, 4, programs=1, ahead=1024),
    },
    32: {
        "tile64x64x4": Tile(64, 64, 4, 4, programs=4, ahead=256),
        "tile64x128x3": Tile(64, 128, 3, 4, programs=3, ahead=256),
        "tile64x128x4": Tile(64, 128, 4, 4, programs=2, ahead=512),
        "tile64x128x8": Tile(64, 128, 8, 4, programs=1, ahead=1024),
    },
    64: {
        "tile64x64x4": Tile(64, 64, 4, 4, programs=3, ahead=256),
        "tile128x64x3": Tile(128, 64, 3, 4, programs=3, ahead=128),
        "tile128x64x4": Tile(128, 64, 4, 4, programs=2, ahead=256),
        "tile128x128x4": Tile(128, 128, 4, 8, programs=1, ahead=512),
        "tile256x64x4": Tile(256, 64, 4, 8, programs=1, ahead=256),
    },
    # Every program reads all activations: with 128 rows as many bytes as there are weights come from the cache.
    128: {
        "tile64x64x3": Tile(64, 64, 3, 4, programs=3, ahead=128),
        "tile128x64x3": Tile(128, 64, 3, 8, programs=2, ahead=128),
        "tile128x64x5": Tile(128, 64, 5, 8, programs=1, ahead=256),
        "tile256x64x4": Tile(256, 64, 4, 16, programs=1, ahead=256),
    },
}
"""By token class; names: rows x warps x unroll, rows x warps x tiles, rows x depth x stages; `a` fetches ahead.

Each was the fastest for some matrix of an 8B or a 0.6B model on an H200 (docs/performance.md)."""

_DEFAULTS = {
    1: "vector2x4x2",
    8: "tile64x128x5",
    16: "tile64x128x5",
    32: "tile64x128x4",
    64: "tile128x64x4",
    128: "tile128x64x3",
}


def configs(num_tokens: int, *, gated: bool) -> dict[str, Config]:
    """What is worth a trial for so many tokens, by name."""
    return {
        name: config
        for name, config in _CONFIGS[token_class(num_tokens)].items()
        # A strip's rows come in eights, and a gate needs its own.
        if not (gated and isinstance(config, Strip) and config.rows < 16)
    }


def default_name(num_tokens: int) -> str:
    """The configuration where nothing was measured: never far from the best on an H200."""
    return _DEFAULTS[token_class(num_tokens)]
