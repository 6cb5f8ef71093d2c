"""Compiles the kernels that look for large logits without a GPU, as real launches would."""

from __future__ import annotations

from typing import Any

from kernels.cuda import logits, logprobs, sampling, sampling_summary
from tests.support.triton_compile import Compiled, compile_kernel

_VECTORS = {
    "temperature": "*fp32",
    "top_k": "*i64",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "seeds": "*i64",
    "positions": "*i64",
}
_SIZES = {"stride": "i32", "vocab": "i32", "num_tiles": "i32", "tiles_each": "i32", "num_spans": "i32", "words": "i32"}


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
_TYPES = _VECTORS | _SIZES | _LOGITS | _COUNTS | _RESULTS


def _compile(
    kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, capability: int, **options: Any
) -> Compiled:
    """With every argument that is not a constant as in a launch whose sizes, but for counts, are multiples of 16."""
    types = {"logits": f"*{dtype}", "scratch": "*fp32", **_TYPES}
    types = {name: types[name] for name in kernel.arg_names if name not in constants}
    unaligned = ("num_tiles", "tiles_each", "num_biases", "num_ends", "mask_stride", "width")
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
    advance = compile_kernel(sampling.advance_rows, types, {"BLOCK": 128}, capability=capability, num_warps=1)
    return [*done, ("advance", advance)]


def _of_dtype(dtype: str, capability: int) -> list[tuple[str, Compiled]]:
    each = 8 if dtype == "bf16" else 4
    no_vectors = dict.fromkeys(_VECTORS)
    row = {"EACH": each, "BLOCK": 2048}
    one_tile = {"num_tiles": 1, "tiles_each": 1}
    whole_rows = {"num_warps": 8, "capability": capability, "maxnreg": 128}

    def summary(noise: bool, sums: int, more: dict[str, Any]) -> Compiled:
        constants = {"PURPOSE": 0, "NOISE": noise, "SUM": sums, "EACH": each, **more}
        registers = sampling_summary.MOST_REGISTERS if sums else sampling_summary.LEAST_REGISTERS
        return _compile(sampling_summary.summarise_tiles, dtype, constants, 1, capability, maxnreg=registers)

    return [
        ("summary, greedy", summary(False, sampling_summary.NO_SUMS, no_vectors)),
        ("summary, greedy, one tile", summary(False, sampling_summary.NO_SUMS, no_vectors | one_tile)),
        ("summary, unfiltered", summary(True, sampling_summary.NO_SUMS, {})),
        ("summary, mixed", summary(True, sampling_summary.SUMS_WHERE_FILTERED, {})),
        ("summary, scores", summary(False, sampling_summary.SUMS, no_vectors)),
        ("argmax", _compile(sampling.take_largest, dtype, {"BLOCK": 2048}, 4, capability)),
        ("draw, unfiltered", _compile(sampling.draw_rows, dtype, {"PURPOSE": 0, "FILTER": False, **row}, **whole_rows)),
        ("draw", _compile(sampling.draw_rows, dtype, {"PURPOSE": 0, "FILTER": True, **row}, **whole_rows)),
        ("thresholds", _compile(logprobs.find_thresholds, dtype, row, **whole_rows)),
        ("process", _compile(logprobs.process_logits, dtype, {"BLOCK": 4096}, 8, capability)),
        ("scores", _compile(logprobs.score_rows, dtype, row | {"LISTS": True}, **whole_rows)),
        ("scores, one wide", _compile(logprobs.score_rows, dtype, row | {"LISTS": True, "width": 1}, **whole_rows)),
        ("scores, none", _compile(logprobs.score_rows, dtype, row | {"LISTS": False}, **whole_rows)),
        ("penalise", _compile(logits.penalise_rows, dtype, {"BLOCK": 2048}, 4, capability, enable_fp_fusion=False)),
        ("edit", _compile(logits.edit_rows, dtype, {"BLOCK": 64, "COMPARED": 32}, 4, capability)),
        ("mask", _compile(logits.mask_rows, dtype, {"WORDS": 64}, 4, capability)),
    ]
