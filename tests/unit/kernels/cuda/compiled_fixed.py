"""Products and attention of fixed order as they are launched for real models, compiled without a GPU.

Not a test by itself: `compile_all` is for a process whose kernels are not interpreted.
"""

from __future__ import annotations

import re

import torch

from kernels.cuda.attention_config import fixed_config, padded
from kernels.cuda.attention_plan import fixed_lanes
from kernels.cuda.fixed_linear import GROUP, MANY_ROWS, TOKENS, fixed_kernel, fixed_tile
from tests.support.triton_compile import Compiled, compile_kernel
from tests.unit.kernels.cuda.compiled_attention import Layer, compile_layer

TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHARED_BYTES = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""What a program may have, by compute capability."""

ARITHMETIC = re.compile(r"\b(?:fma|mul|add|sub|neg|max|ex2|rcp|cvt|mma|wgmma\.mma_async)\.[\w.:]*f(?:16|32)[\w.]*")
LISTED = frozenset({"tiles"})


def compile_all() -> list[tuple[str, Compiled]]:
    """Names and results."""
    done = []
    for dtype in TYPES:
        for rows in (4096, MANY_ROWS):
            for gated in (False, True):
                name = f"fixed {dtype} {rows} rows{', gated' if gated else ''}"
                done.append((name, compile_product(dtype, rows, gated=gated)))
                done.append((f"{name}, bias, uneven", compile_product(dtype, rows, gated=gated, bias=True, even=False)))
    done.append(("fixed bf16, capability 8.0", compile_product("bf16", MANY_ROWS, gated=True, capability=80)))
    for name, kernel in done:
        assert kernel.shared_bytes <= SHARED_BYTES[86], name
        assert ("mma" in kernel.ptx) == ("fp32" not in name), name
    for dtype, kv_dtype in (("bf16", "bf16"), ("fp16", "fp8e4nv"), ("fp32", "fp32")):
        done += _same_arithmetic(dtype, kv_dtype)
    every = LISTED | {"sinks", "lse"}
    more = {
        "64": (_layer(group=3, head_dim=64), 90),
        "256": (_layer(group=8, head_dim=256), 90),
        "256 fp8": (_layer(group=8, head_dim=256, kv_dtype="fp8e5"), 90),
        "window softcap sinks lse": (_layer(window=True, softcap=True, has=every), 90),
        "256 fp32": (_layer(group=8, head_dim=256, dtype="fp32"), 90),
        "96 heads": (_layer(group=96, head_dim=64), 90),
        "64, capability 8.0": (_layer(group=3, head_dim=64), 80),
        "64, capability 8.6": (_layer(group=3, head_dim=64), 86),
    }
    for name, (layer, capability) in more.items():
        attention = _attention(layer, capability)
        assert attention.shared_bytes <= SHARED_BYTES[capability], name
        done.append((f"fixed attention {name}", attention))
    return done


def compile_product(
    dtype: str, rows: int, *, gated: bool = False, bias: bool = False, even: bool = True, capability: int = 90
) -> Compiled:
    """As a launch specialises it for dimensions that are multiples of 16."""
    types = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), f"*{dtype}")
    types |= dict.fromkeys(("num_tokens", "OUT_DIM", "in_dim", "x_stride", "weight_stride"), "i32")
    tile = fixed_tile(rows, TYPES[dtype])
    constants: dict[str, object] = {"TOKENS": TOKENS, "ROWS": tile.rows, "DEPTH": tile.depth, "GROUP": GROUP}
    constants |= {"EVEN": even, "GATED": gated, "PRECISION": "ieee" if dtype == "fp32" else "tf32"}
    if bias:
        types["bias_ptr"] = f"*{dtype}"
    else:
        constants["bias_ptr"] = None
    return compile_kernel(
        fixed_kernel,
        types,
        constants,
        capability=capability,
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=tuple(name for name in types if name != "num_tokens"),
    )


def _same_arithmetic(dtype: str, kv_dtype: str) -> list[tuple[str, Compiled]]:
    """Kernels for batches that need a list of tiles and for those that do not, and for pages of any size: their loops
    must be the same computation."""
    done = []
    for page_size in (1, 16, 64):
        for has in (frozenset(), LISTED):
            name = f"fixed attention {dtype} {kv_dtype}, page {page_size}{', list' if has else ''}"
            done.append((name, _attention(_layer(dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, has=has), 90)))
    wanted = _arithmetic(done[0][1].ptx)
    assert any("mma" in step for step in wanted) == (dtype != "fp32")
    for name, kernel in done:
        assert _arithmetic(kernel.ptx) == wanted, name
    return done


def _arithmetic(ptx: str) -> list[str]:
    """What the loop over keys does to floats, in order."""
    (loop,) = re.findall(r"(\$L__BB\w+):((?:(?!\$L__BB\w+:).)*?)bra(?:\.uni)?\s+\1;", ptx, re.DOTALL)
    return ARITHMETIC.findall(loop[1])


def _layer(*, group: int = 4, dtype: str = "bf16", **more) -> Layer:
    lanes = fixed_lanes(group, dtype == "fp32")[0]
    kinds = {"dtype": dtype, "kv_dtype": "fp32" if dtype == "fp32" else "bf16"}
    return Layer(group=group, lanes=lanes, longest=lanes, **(kinds | more))


def _attention(layer: Layer, capability: int) -> Compiled:
    itemsize = 4 if layer.dtype == "fp32" else 1 if layer.kv_dtype.startswith("fp8") else 2
    config = fixed_config(padded(layer.head_dim), itemsize, SHARED_BYTES[capability])
    return compile_layer(layer, config, capability)


if __name__ == "__main__":
    for case, result in compile_all():
        print(f"{case:50} {result.registers:4} {result.spilled_bytes:5} {result.shared_bytes:7}")
