"""The kernels of small products as they are launched for bf16 models, compiled without a GPU.

Not a test by itself: `compile_all` is for a process whose kernels are not interpreted.
"""

from __future__ import annotations

import re

from kernels.cuda.small_gemm import strip_kernel, vector_kernel
from kernels.cuda.small_gemm_launch import MOST_GATED_ROWS, TOKEN_CLASSES, Strip, Tile, Vector, configs
from kernels.cuda.tile_gemm import tile_kernel
from tests.support.triton_compile import Compiled, compile_kernel
from tests.unit.kernels.cuda.dependent import assert_waits

POINTERS = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16"}
SIZES = {"OUT_DIM": "i32", "in_dim": "i32", "weight_stride": "i32"}
MATRIX_SIZES = {"num_tokens": "i32", "x_stride": "i32", "out_stride": "i32"}
SCRATCH = {"scratch_ptr": "*fp32", "tickets_ptr": "*i32"}

SHARED_BYTES = 228 * 1024
"""Of a multiprocessor of compute capability 9.0, where each program costs RESERVED_BYTES more than it asks for."""

RESERVED_BYTES = 1024


def compile_all(capability: int = 90) -> list[tuple[str, Compiled]]:
    """Names and results."""
    pdl = capability >= 90
    done = []
    for tokens in TOKEN_CLASSES:
        for gated in (False, True):
            for name, config in configs(tokens, gated=gated).items():
                if isinstance(config, Tile) and tokens == 8:
                    continue  # The same as for 16.
                full = f"{name}, {tokens} tokens{', gated' if gated else ''}"
                plain = compile_config(config, tokens, gated=gated, capability=capability)
                if isinstance(config, Strip):
                    assert is_direct(plain.ptx), full
                elif isinstance(config, Tile):
                    assert is_pipelined(plain.ptx, config, capability), full
                    shared = plain.shared_bytes + RESERVED_BYTES
                    assert capability < 90 or config.programs * shared <= SHARED_BYTES, (full, plain.shared_bytes)
                else:
                    assert not re.search(r"ld\.global(?!\S*\.v4\.b32)", plain.ptx), full
                done.append((full, plain))
                if isinstance(config, Tile) and not (gated and config.rows > MOST_GATED_ROWS):
                    parts = compile_config(config, tokens, gated=gated, parts=4, pdl=pdl, capability=capability)
                    done.append((f"{full}, parts, pdl", parts))
                elif pdl and not isinstance(config, Tile):
                    early = compile_config(config, tokens, gated=gated, pdl=True, capability=capability)
                    done.append((f"{full}, pdl", early))
                more = compile_config(
                    config, tokens, gated=gated, bias=True, even=False, pdl=pdl, capability=capability
                )
                done.append((f"{full}, bias, uneven, pdl", more))
    for name, kernel in done:
        if pdl and name.endswith("pdl"):
            assert_waits(name, kernel.ptx, reads_weights=True)
    return done


def is_direct(ptx: str) -> bool:
    """Whether the loop takes 16 bytes at a time from memory to tensor cores, past shared memory and barriers."""
    loop = re.search(r"(\$L__BB\w+):(?:(?!\$L__BB\w+:).)*?bra\s+\1;", ptx, re.DOTALL)
    assert loop is not None
    loads = re.findall(r"ld\.global\S*", loop[0])
    return "mma" in loop[0] and all(".v4.b32" in load for load in loads) and not re.search(r"shared|bar\.", loop[0])


def is_pipelined(ptx: str, config: Tile, capability: int) -> bool:
    """Whether the loop has asynchronous loads of 16 bytes, and tensor cores that take weights from shared memory."""
    loop = re.search(r"(\$L__BB\w+):(?:(?!\$L__BB\w+:).)*?bra\s+\1;", ptx, re.DOTALL)
    assert loop is not None
    wide = re.findall(r"cp\.async\.cg\S*", loop[0])
    threads = 32 * config.warps
    stored = re.search(r"st\.shared|ld\.global|ld\.shared", loop[0])
    asynchronous = "wgmma" in loop[0] if capability == 90 and config.rows >= 64 else "ldmatrix" in loop[0]
    return len(wide) >= config.rows * config.depth // 8 // threads and asynchronous and not stored


def compile_config(
    config: Strip | Vector | Tile,
    tokens: int,
    *,
    gated: bool = False,
    bias: bool = False,
    even: bool = True,
    pdl: bool = False,
    parts: int = 1,
    capability: int = 90,
) -> Compiled:
    """As the configuration's launch specialises it for dimensions that are multiples of 16."""
    types = POINTERS | SIZES
    constants: dict[str, object] = {"ROWS": config.rows, "EVEN": even, "GATED": gated, "PDL": pdl}
    constants["AHEAD"] = config.ahead if pdl else 0
    limit, stages = None, 1
    if isinstance(config, Tile):
        kernel: object = tile_kernel
        types = types | MATRIX_SIZES
        constants |= {"TOKENS": max(tokens, 16), "DEPTH": config.depth, "PARTS": parts}
        if parts > 1:
            types = types | SCRATCH
        else:
            constants |= dict.fromkeys(SCRATCH)
        stages = config.stages
    elif isinstance(config, Strip):
        kernel = strip_kernel
        types = types | MATRIX_SIZES
        constants |= {"TOKENS": max(tokens, 8), "WARPS": config.warps, "UNROLL": config.unroll}
        limit = config.limit(even=even)
    else:
        kernel = vector_kernel
        constants |= {"WIDTH": config.width, "TILES": config.tiles}
        limit = config.limit(even=even)
    if bias:
        types = types | {"bias_ptr": "*bf16"}
    else:
        constants |= {"bias_ptr": None}
    return compile_kernel(
        kernel,
        types,
        constants,
        capability=capability,
        num_warps=config.warps,
        num_stages=stages,
        aligned=tuple(name for name in types if name != "num_tokens"),
        options={} if limit is None else {"maxnreg": limit},
    )
