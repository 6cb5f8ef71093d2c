"""Time of every kernel on a CUDA device, beside the alternatives and the bound by bytes and operations.

PYTHONPATH=. python tools/bench_kernels.py [--ops linear attention] [--models 8B] [--batches 1 32] [--json FILE]

Times are of calls inside a CUDA graph, each with inputs of its own, together three times the size of the second-level
cache. The bound is the larger of the fewest bytes over the rate of a copy and the operations over the rate of a large
bf16 product, both measured first; `share` is bound over time.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from kernels.cuda.context import Context, make_context
from kernels.cuda.tuning import Tuner
from kernels.dispatch import KernelSet, select
from tools.kernel_bench import attending, pointwise, products, report, sampling
from tools.kernel_bench.case import Case, Result, run_case
from tools.kernel_bench.measure import measure_ceilings
from tools.kernel_bench.shapes import SHAPES, Shape

Cases = Callable[[argparse.Namespace, KernelSet, Context, Shape], Iterator[Case]]


def _pointwise(options: argparse.Namespace, kernels: KernelSet, _: Context, shape: Shape) -> Iterator[Case]:
    for batch in (*options.batches, 4096):
        yield from pointwise.norm_cases(kernels, shape, batch)
        yield from pointwise.gate_cases(kernels, shape, batch)
        yield from pointwise.rope_cases(kernels, shape, batch)
        yield from pointwise.embed_cases(kernels, shape, batch)


def _pages(options: argparse.Namespace, kernels: KernelSet, _: Context, shape: Shape) -> Iterator[Case]:
    for batch in options.batches:
        yield from pointwise.page_cases(kernels, shape, batch)


def _linear(options: argparse.Namespace, kernels: KernelSet, context: Context, shape: Shape) -> Iterator[Case]:
    for batch in options.batches:
        yield from products.linear_cases(kernels, context, shape, batch, all_configs=options.all_configs)


def _attention(options: argparse.Namespace, kernels: KernelSet, context: Context, shape: Shape) -> Iterator[Case]:
    decode = attending.decode_ways(kernels, context, shape, all_configs=options.all_configs)
    ways = attending.prefill_ways(kernels, context, shape, all_configs=options.all_configs)
    for batch in options.batches:
        for page_size in options.page_sizes:
            yield from attending.decode_cases(decode, shape, batch, page_size)
    for lengths in ([512], [1024], [4096], [16384], [512] * 16):
        yield from attending.prefill_cases(ways, shape, lengths, 64)
    yield from attending.shared_cases({"engine": kernels.paged_attention}, shape, 256, 2048, 128, 64)


def _sampling(options: argparse.Namespace, kernels: KernelSet, _: Context, shape: Shape) -> Iterator[Case]:
    for batch in options.batches:
        yield from sampling.sample_cases(kernels, shape, batch)
        yield from sampling.score_cases(kernels, shape, batch)
        yield from sampling.adjust_cases(kernels, shape, batch)


OPS: dict[str, Cases] = {
    "pointwise": _pointwise,
    "pages": _pages,
    "linear": _linear,
    "attention": _attention,
    "sampling": _sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS), help="default: all")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="default: all")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256], help="default: %(default)s")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=[1, 16, 64], help="default: %(default)s")
    parser.add_argument(
        "--all-configs", action="store_true", help="also each configuration that the engine chooses among"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--choices", type=Path, help="keep what the engine chose in this directory")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    logging.basicConfig(level=os.environ.get("LOG_LEVEL", "WARNING").upper())
    torch.manual_seed(0)
    ceilings = measure_ceilings()
    device = torch.device("cuda")
    context = make_context(device, Tuner(device, options.choices))
    kernels = select("cuda", torch.bfloat16, context=context)
    print(report.header(ceilings), flush=True)
    results: list[Result] = []
    for op in options.ops:
        for model in options.models:
            for case in OPS[op](options, kernels, context, SHAPES[model]):
                found = run_case(case, ceilings)
                results += found
                for result in found:
                    print(report.line(result), flush=True)
                if options.json is not None:
                    report.write_json(options.json, ceilings, results)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
