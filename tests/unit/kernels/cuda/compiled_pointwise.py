"""The pointwise, page and embedding kernels as they are launched for bf16 models, compiled without a GPU.

Not a test by itself: `compile_all` is for a process whose kernels are not interpreted.
"""

from __future__ import annotations

from functools import partial

from kernels.cuda.activation import gate_rows
from kernels.cuda.embedding import copy_rows
from kernels.cuda.norm import norm_config, rms_long_rows, rms_rows
from kernels.cuda.pages import BLOCK, gather_page_rows, list_pages, move_places
from kernels.cuda.rope_store import rope_config, rope_store_heads
from kernels.cuda.step import PAGE_BLOCK, ROW_BLOCK, TOKEN_BLOCK, end_rows, fill_rows
from tests.support.triton_compile import Compiled, compile_kernel
from tests.unit.kernels.cuda.dependent import both_ways

NORMS = ((128, "", False), (1024, "", True), (4096, "", False), (4096, "", True), (5120, "", True), (8192, "", True))
CODED_NORMS = ((1024, "e4m3", True), (4096, "e4m3", True), (8192, "e4m3", True), (4096, "e5m2", True))
INT8_NORMS = ((4096, "int8", True), (16384, "int8", True))
LONG_NORMS = ((20480, "", True), (20480, "e4m3", True))

HEADS = ((32, 8, 128), (9, 3, 64), (16, 2, 256), (4, 4, 80))


def compile_all(capability: int = 90) -> list[tuple[str, Compiled]]:
    """Names and results."""
    done = []
    for dim, format, adds in NORMS + CODED_NORMS + INT8_NORMS + LONG_NORMS:
        name = f"norm {dim} {format or 'bf16'}{' add' if adds else ''}"
        done += both_ways(name, partial(_norm, dim, format, adds, capability), capability)
    for function in ("silu", "gelu", "gelu_tanh"):
        done += both_ways(f"{function}_and_mul", partial(_gate, function, capability), capability)
    for heads, kv_heads, head_dim in HEADS:
        for tokens in (1, 8192):
            name = f"rope_store {heads}/{kv_heads}x{head_dim}, {tokens} tokens"
            rope = partial(_rope, tokens, heads, kv_heads, head_dim, capability=capability)
            done += both_ways(name, rope, capability)
            done += both_ways(f"{name}, norms", partial(rope, norms=True), capability)
    for tokens in (1, 8192):
        name = f"rope_store 32/8x128, {tokens} tokens"
        rope = partial(_rope, tokens, 32, 8, 128, capability=capability)
        done += both_ways(f"{name}, e4m3", partial(rope, format="e4m3", norms=True), capability)
        done += both_ways(f"{name}, half", partial(rope, rotary_dim=64, norms=True), capability)
        done += both_ways(f"{name}, pairs", partial(rope, rotary_dim=64, interleaved=True), capability)
        done += both_ways(f"{name}, axes", partial(rope, axes=True), capability)
    # Where 8-bit floats have no instruction.
    done.append(("norm 4096 e4m3 add, capability 8.0", _norm(4096, "e4m3", True, 80, False)))
    rope_sm80 = _rope(1, 32, 8, 128, False, format="e5m2", capability=80)
    done.append(("rope_store 32/8x128, e5m2, capability 8.0", rope_sm80))
    done += both_ways("embed", partial(_embed, capability), capability)
    return done + _pages(capability) + _steps(capability)


def _norm(dim: int, format: str, adds: bool, capability: int, pdl: bool) -> Compiled:
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16", "num_rows": "i32", "outer_stride": "i32"}
    types |= {"inner_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
    block, rows, warps = norm_config(dim)
    constants = {"DIM": dim, "BLOCK": block, "ROWS": rows, "FORMAT": format, "INSTRUCTION": capability >= 89}
    constants |= {"inner": 1, "residual": None, "scales": None, "PDL": pdl}
    if dim == 128:
        # A view of heads.
        types["inner"] = "i32"
        del constants["inner"]
    if format:
        types |= {"out": "*u8", "scales": "*fp32"}
        del constants["scales"]
    if adds:
        types["residual"] = "*bf16"
        del constants["residual"]
    aligned = tuple(name for name in types if name not in ("eps", "num_rows", "inner"))
    kernel = rms_rows if dim <= block else rms_long_rows
    return compile_kernel(kernel, types, constants, capability=capability, num_warps=warps, aligned=aligned)


def _gate(function: str, capability: int, pdl: bool) -> Compiled:
    types = {"gate_up": "*bf16", "out": "*bf16", "stride": "i32"}
    constants = {"INNER": 14336, "BLOCK": 1024, "FUNCTION": function, "PDL": pdl}
    return compile_kernel(gate_rows, types, constants, capability=capability, aligned=tuple(types))


def _rope(
    tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    pdl: bool,
    *,
    rotary_dim: int = 0,
    interleaved: bool = False,
    axes: bool = False,
    norms: bool = False,
    format: str = "",
    capability: int,
) -> Compiled:
    types = dict.fromkeys(("q", "k", "v", "kv"), "*bf16")
    types |= dict.fromkeys(("positions", "locations"), "*i64") | {"cos_sin": "*fp32"}
    types |= dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32")
    strides = ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "cos_sin_stride")
    strides += ("kv_page", "kv_half", "kv_token", "kv_head", "position_axis")
    types |= dict.fromkeys(strides, "i32")
    constants = {"axes": None, "q_norm": None, "k_norm": None, "position_token": 1}
    if axes:
        types["axes"] = "*i64"
    if norms:
        types |= {"q_norm": "*bf16", "k_norm": "*bf16"}
    if format:
        types["kv"] = "*u8"
    rotary_dim = rotary_dim or head_dim
    heads, kv_heads, warps = rope_config(tokens, num_heads, num_kv_heads, head_dim)
    constants = {name: value for name, value in constants.items() if name not in types} | {
        "PAGE_SIZE": 16,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY_DIM": rotary_dim,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "INTERLEAVED": interleaved,
        "SCALED": format != "",
        "FORMAT": format,
        "INSTRUCTION": capability >= 89,
        "PDL": pdl,
    }
    aligned = tuple(name for name in types if name not in ("eps", "k_scale", "v_scale", "position_axis"))
    return compile_kernel(rope_store_heads, types, constants, capability=capability, num_warps=warps, aligned=aligned)


def _embed(capability: int, pdl: bool) -> Compiled:
    types = {"table": "*bf16", "ids": "*i64", "out": "*bf16", "stride": "i32"}
    constants = {"DIM": 4096, "BLOCK": 1024, "PDL": pdl}
    return compile_kernel(copy_rows, types, constants, capability=capability, aligned=tuple(types))


def _pages(capability: int) -> list[tuple[str, Compiled]]:
    types = {"page_table": "*i32", "rows": "*i64", "kv_lens": "*i64", "out": "*i32", "stride": "i32"}
    aligned = tuple(types)
    types["num_columns"] = "i32"
    sizes = {"PAGE_SIZE": 16, "BLOCK": BLOCK}
    gather = compile_kernel(gather_page_rows, types, sizes, capability=capability, aligned=aligned)
    types = {"page_table": "*i32", "kv_lens": "*i64", "pages": "*i32", "starts": "*i32", "last": "*i32"}
    types |= dict.fromkeys(("num_rows", "size", "stride"), "i32")
    aligned = tuple(name for name in types if name not in ("num_rows", "size"))
    lists = compile_kernel(list_pages, types, sizes | {"ROWS": 256}, capability=capability, aligned=aligned)
    types = dict.fromkeys(("addresses", "sources", "targets", "counts"), "*i64")
    types |= dict.fromkeys(("source_row", "target_row", "page_stride", "half_stride", "token_stride"), "i32")
    types |= {"head_stride": "i32"}
    constants = {"PAGE_SIZE": 16, "SIZE": 1024, "HEAD_DIM": 1024, "PLACES": 4, "BLOCK": 1024}
    constants |= {"source_column": 1, "target_column": 1, "ITEM_BYTES": 2, "ALIGNED": 16}
    aligned = tuple(name for name in types if name not in ("source_row", "target_row"))
    move = compile_kernel(move_places, types, constants, capability=capability, aligned=aligned)
    assert "ld.global.v4.b32" in move.ptx and "st.global.v4.b32" in move.ptx
    spread = constants | {"HEAD_DIM": 80, "SIZE": 640}
    apart = compile_kernel(move_places, types, spread, capability=capability, aligned=aligned)
    return [("gather_pages", gather), ("page_lists", lists), ("compact_kv", move), ("compact_kv, heads apart", apart)]


def _steps(capability: int) -> list[tuple[str, Compiled]]:
    begin = partial(_fill, 1, capability)
    many = partial(_fill, TOKEN_BLOCK, capability)
    return [
        *both_ways("step_inputs, decode", begin, capability),
        *both_ways("step_inputs, rows", many, capability),
        *both_ways("advance_ends", partial(_end, capability), capability),
    ]


def _fill(tokens: int, capability: int, pdl: bool) -> Compiled:
    vectors = ("rows", "seq_len", "last_token", "tokens", "positions", "locations", "kv_lens")
    types = dict.fromkeys(vectors, "*i64") | {"ended": "*u8", "page_table": "*i32", "out_table": "*i32"}
    types |= dict.fromkeys(("scratch_slot", "max_pages", "width", "table_stride", "out_stride"), "i32")
    types |= {"scratch_location": "i64"}
    constants: dict[str, object] = {"PAGE_SIZE": 64, "EMPTIES_ENDED": tokens == 1, "TOKENS": tokens}
    constants |= {"PAGES": PAGE_BLOCK, "PDL": pdl}
    if tokens == 1:
        constants |= {"q_starts": None, "host_tokens": None}
    else:
        types |= {"q_starts": "*i32", "host_tokens": "*i32"}
    aligned = ("seq_len", "last_token", "ended", "page_table")
    return compile_kernel(fill_rows, types, constants, capability=capability, aligned=aligned)


def _end(capability: int, pdl: bool) -> Compiled:
    types = {"rows": "*i64", "drawn": "*i32", "last_token": "*i64", "ended": "*u8", "stop_ids": "*i32"}
    types |= dict.fromkeys(("num_rows", "widest", "stop_stride"), "i32")
    aligned = ("last_token", "ended", "stop_ids")
    constants = {"ROWS": ROW_BLOCK, "PDL": pdl}
    return compile_kernel(end_rows, types, constants, capability=capability, num_warps=1, aligned=aligned)
