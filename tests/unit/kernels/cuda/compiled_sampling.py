"""Compiles the kernels that look for large logits without a GPU, as real launches would."""

from __future__ import annotations

from typing import Any

import torch

from kernels.cuda import logits, logprobs, sampling, sampling_candidates, sampling_summary
from kernels.cuda.sampling_threshold import unused_bits
from tests.support.triton_compile import Compiled, compile_kernel
from tests.unit.kernels.cuda.dependent import both_ways

_VECTORS = {
    "temperature": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
}
_SIZES = {
    "stride": "i32",
    "vocab": "i32",
    "num_tiles": "i32",
    "tiles_each": "i32",
    "num_spans": "i32",
    "num_chunks": "i32",
    "words": "i32",
    "capacity": "i32",
}


_LOGITS = {
    "kv_lens": "*i64",
    "repetition": "*fp32",
    "presence": "*fp32",
    "frequency": "*fp32",
    "in_prompt": "*i1",
    "output_counts": "*i32",
    "rows": "*i64",
    "entries": "*i64",
    "bias_ids": "*i64",
    "bias_values": "*fp32",
    "end_ids": "*i64",
    "min_lens": "*i64",
    "bitmask": "*i32",
}
_COUNTS = {"num_biases": "i32", "num_ends": "i32", "mask_stride": "i32", "width": "i32"}
_RESULTS = {
    "drawn": "*i32",
    "tokens": "*i64",
    "thresholds": "*fp32",
    "processed": "*fp32",
    "chosen": "*fp32",
    "ids": "*i64",
    "tops": "*fp32",
}
Named = list[tuple[str, Compiled]]

_TYPES = _VECTORS | _SIZES | _LOGITS | _COUNTS | _RESULTS


def _compile(
    kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, capability: int, **options: Any
) -> Compiled:
    """With every argument that is not a constant as in a launch whose sizes, but for counts, are multiples of 16."""
    types = {"logits": f"*{dtype}", "scratch": "*fp32", **_TYPES}
    types = {name: types[name] for name in kernel.arg_names if name not in constants}
    unaligned = ("num_tiles", "tiles_each", "num_chunks", "num_biases", "num_ends", "mask_stride", "width")
    aligned = tuple(name for name in types if name not in unaligned)
    return compile_kernel(
        kernel, types, constants, capability=capability, num_warps=num_warps, aligned=aligned, options=options
    )


def compile_all(capability: int = 90) -> list[tuple[str, Compiled]]:
    """Name and result of each kernel in the configurations of a 128k vocabulary."""
    done: list[tuple[str, Compiled]] = []
    for dtype in ("bf16", "fp32"):
        done += [(f"{name} {dtype}", compiled) for name, compiled in _of_dtype(dtype, capability)]
    types = {"last_token": "*i64", "rows": "*i64", "drawn": "*i32", "num": "i32"}

    def advance(pdl: bool) -> Compiled:
        constants = {"BLOCK": 128, "PDL": pdl}
        return compile_kernel(sampling.advance_rows, types, constants, capability=capability, num_warps=1)

    return done + both_ways("advance", advance, capability)


def _of_dtype(dtype: str, capability: int) -> list[tuple[str, Compiled]]:
    each, unused = (8, unused_bits(torch.bfloat16)) if dtype == "bf16" else (4, 0)
    no_vectors = dict.fromkeys(_VECTORS)
    no_filters = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
    one_tile = {"num_tiles": 1, "tiles_each": 1}
    bound = {"EACH": each, "BLOCK": 2048}
    most = {"maxnreg": sampling_candidates.MOST_REGISTERS}
    choose = {"PURPOSE": 0, "UNUSED": unused, "CHUNKS": 64, "BLOCK": 2048, "INSTRUCTION": True}

    def of(name: str, kernel: Any, constants: dict[str, Any], num_warps: int, **options: Any) -> Named:
        if "PDL" not in kernel.arg_names:
            return [(name, _compile(kernel, dtype, constants, num_warps, capability, **options))]

        def make(pdl: bool) -> Compiled:
            return _compile(kernel, dtype, constants | {"PDL": pdl}, num_warps, capability, **options)

        return both_ways(name, make, capability)

    def summary(name: str, draws: bool, filters: bool, sums: int, more: dict[str, Any]) -> Named:
        constants = {
            "PURPOSE": 0,
            "DRAW": draws,
            "FILTER": filters,
            "SUM": sums,
            "EACH": each,
            "INSTRUCTION": True,
            "PARTS": 1,
        }
        registers = sampling_summary.MOST_REGISTERS if sums else sampling_summary.LEAST_REGISTERS
        return of(f"summary, {name}", sampling_summary.summarise_tiles, constants | more, 1, maxnreg=registers)

    no_sums, top_p_sums = sampling_summary.NO_SUMS, sampling_summary.SUMS_FOR_TOP_P
    return [
        *summary("greedy", False, False, no_sums, no_vectors),
        *summary("greedy, one tile", False, False, no_sums, no_vectors | one_tile),
        *summary("unfiltered", True, False, no_sums, {}),
        *summary("few rows", True, False, no_sums, {"PARTS": 4, "tiles_each": 1}),
        *summary("mixed", True, True, top_p_sums, {}),
        *summary("filtered", False, True, top_p_sums, {"seeds": None, "positions": None}),
        *summary("scores", False, False, sampling_summary.SUMS, no_vectors),
        *of("bound", sampling_candidates.bound_rows, bound | {"width": None}, 8, **most),
        *of("bound, scores", sampling_candidates.bound_rows, bound | no_filters, 8, **most),
        *of("collect", sampling_candidates.collect_candidates, {"EACH": each}, 1),
        *of("argmax", sampling.take_largest, {"BLOCK": 2048}, 4),
        *of("choose, unfiltered", sampling.choose_rows, choose | {"FILTER": False}, 4, **most),
        *of("choose", sampling.choose_rows, choose | {"FILTER": True}, 8, **most),
        *of("thresholds", logprobs.find_thresholds, {"UNUSED": unused}, 8, **most),
        *of("process", logprobs.process_logits, {"BLOCK": 4096}, 8),
        *of("scores", logprobs.score_rows, {"BLOCK": 2048}, sampling_candidates.BOUND_WARPS),
        *of("scores, listed", logprobs.list_largest, {}, 4, **most),
        *of("penalise", logits.penalise_rows, {"BLOCK": 2048}, 4, enable_fp_fusion=False),
        *of("edit", logits.edit_rows, {"BLOCK": 64, "COMPARED": 32}, 4),
        *of("mask", logits.mask_rows, {"WORDS": 64}, 4),
    ]
