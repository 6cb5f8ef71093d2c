"""The matrix products of a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels import linear
from kernels.cuda.context import Context
from kernels.cuda.linear import GatedLinear, Linear
from kernels.cuda.small_gemm_launch import MAX_TOKENS
from kernels.dispatch import KernelSet
from tools.kernel_bench.case import Case, calls_of
from tools.kernel_bench.measure import Call, copies_past_cache
from tools.kernel_bench.shapes import Shape


def linear_cases(
    kernels: KernelSet, context: Context, shape: Shape, batch: int, *, all_configs: bool
) -> Iterator[Case]:
    """Every matrix of the model; gate_up with its gate. all_configs: the small-batch kernel's, each by name."""
    for name, (out_dim, in_dim) in shape.linears().items():
        size = 2 * (out_dim * in_dim + batch * in_dim)
        copies = copies_past_cache(size, most=32)
        inputs = [
            (
                torch.randn(batch, in_dim, device="cuda", dtype=torch.bfloat16),
                torch.randn(out_dim, in_dim, device="cuda", dtype=torch.bfloat16).mul_(in_dim**-0.5),
                None,
            )
            for _ in range(copies)
        ]
        flops = 2 * batch * out_dim * in_dim
        out_bytes = 2 * batch * (out_dim // 2 if name == "gate_up" else out_dim)
        what = f"{name} {batch} x {in_dim} -> {out_dim}"
        op = "gated_linear" if name == "gate_up" else "linear"
        ways = {way: calls_of(getattr(module, op), inputs) for way, module in (("engine", kernels), ("torch", linear))}
        if all_configs:
            ways |= _configs(context, name, batch, inputs)
        yield Case(op, shape.name, what, size + out_bytes, flops, ways)
        del inputs, ways
        torch.cuda.empty_cache()


def _configs(context: Context, name: str, batch: int, inputs: list[tuple]) -> dict[str, list[Call]]:
    """What the engine's kernel chooses among, without and with dependent launch."""
    if batch > MAX_TOKENS:
        return {}
    kind = GatedLinear if name == "gate_up" else Linear
    ways: dict[str, list[Call]] = {}
    for mark, pdl in (("", False), (" pdl", True)):
        for config, product in kind(context, pdl=pdl).candidates(batch).items():
            if config != "torch":
                ways[config + mark] = calls_of(product, inputs)
    return ways
