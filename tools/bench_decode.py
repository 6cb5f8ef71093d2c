"""Decode steps and prompts of a model through the whole scheduler, in this process: no HTTP, no detokenizer.

    PYTHONPATH=. python tools/bench_decode.py --shape 8b --batch 1 8 32 128 256 --prefill 512 4096 16384 --json out.json
    PYTHONPATH=. python tools/bench_decode.py --shape 0.6b --batch 1 --trace steps.json.gz --gaps --timeline steps.svg

A step is (time for 129 tokens - time for 1) / 128 of a batch of 1024-token prompts that are cached, the median of 3;
`steady` is a turn of the loop while all rows decode. The floor is weights and contexts read once at --bandwidth. A
prompt is one request with fresh ids and one token of answer on an idle engine, from the call to its end.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from engine.bench.options import count
from tools.decode_bench.driver import Driver
from tools.decode_bench.engine import add_engine_options, configure, find_model, machine, memory, run_tool, start
from tools.decode_bench.measure import REPEATS, DecodeRow, PrefillRow, measure_decode, measure_prefill, prompts_of
from tools.decode_bench.profile import ROOM, record_steps
from tools.decode_bench.timeline import timeline
from tools.decode_bench.trace import Gaps, describe, gaps_of, read_trace

H200_GB_PER_S = 4235.0
PARTS = ("plan", "launch", "collect", "send")
"""Of a turn of the loop, host microseconds each."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--batch", type=count, nargs="*", default=[1, 8, 32, 128, 256], help="default: %(default)s")
    parser.add_argument("--context", type=count, default=1024, help="tokens of each prompt; default: %(default)s")
    parser.add_argument("--steps", type=count, default=128, help="decode steps; default: %(default)s")
    parser.add_argument("--prefill", type=count, nargs="*", default=[], help="lengths of prompts to time")
    parser.add_argument("--bandwidth", type=float, help="GB/s of the floor; on CUDA 4235, elsewhere there is none")
    parser.add_argument("--trace", type=Path, help="write a Chrome trace (.json, .json.gz) of the first batch's steps")
    parser.add_argument("--gaps", action="store_true", help="print what the trace says of the device's idle time")
    parser.add_argument("--timeline", type=Path, help="draw two steps of the trace as SVG")
    return parser.parse_args(arguments)


def pool_tokens(options: argparse.Namespace) -> int:
    """Twice what the largest batch holds, and all prompts."""
    rows, page = max(options.batch, default=1), options.page_size or 64
    answer = max(options.steps, ROOM) + 2 * page
    return rows * (options.context + 3 * answer) + (REPEATS + 2) * (sum(options.prefill) + page)


def print_decode(row: DecodeRow) -> None:
    floor = "       -      -" if row.floor_ms is None else f"{row.floor_ms:8.2f} {row.share or 0:6.1%}"
    parts = " ".join(f"{row.host_us[part]:8.0f}" for part in PARTS)
    print(
        f"{row.batch:5} {row.ms_per_step:8.2f} {row.tokens_per_s:9.0f} {floor} {row.steady_ms:8.2f} {parts}", flush=True
    )


def trace(options: argparse.Namespace, driver: Driver, prompts: list[np.ndarray], folder: Path) -> Gaps | None:
    """Record steps, and say of them what was asked for."""
    path = options.trace or folder / "steps.json"
    record_steps(driver, prompts, path)
    found = read_trace(path)
    gaps = gaps_of(found)
    if gaps is None:
        print("trace: no kernels; the device's time is not known")
        return None
    if options.gaps:
        print(f"batch {len(prompts)}: {describe(gaps)}", flush=True)
    if options.timeline:
        title = (
            f"{options.model or options.shape}, batch {len(prompts)}, overlap depth {driver.scheduler.overlap_depth}"
        )
        options.timeline.write_text(timeline(found, title))
    return gaps


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that was asked for, printed as it comes. Raises EngineError where the engine cannot start."""
    model = find_model(options, folder)
    config = configure(options, max(options.batch, default=1), pool_tokens(options))
    driver, seconds = start(config, model, folder)
    bandwidth = options.bandwidth or (H200_GB_PER_S if config.device == "cuda" else None)
    prompts = prompts_of(max(options.batch, default=0), options.context, seed=0)
    decode: list[DecodeRow] = []
    if options.batch:
        print(f"{'batch':>5} {'ms/step':>8} {'tok/s':>9} {'floor ms':>8} {'share':>6} {'steady':>8} ", end="")
        print(" ".join(f"{part:>8}" for part in PARTS) + " us")
    for batch in options.batch:
        decode.append(measure_decode(driver, model.config, prompts[:batch], options.steps, bandwidth))
        print_decode(decode[-1])
    gaps = None
    if options.batch and (options.trace or options.gaps or options.timeline):
        gaps = trace(options, driver, prompts[: options.batch[0]], folder)
    prefill: list[PrefillRow] = []
    for index, length in enumerate(options.prefill):
        prefill.append(measure_prefill(driver, length, seed=2 + index))
        print(f"prefill {length:6} tokens {prefill[-1].ms:9.1f} ms {prefill[-1].tokens_per_s:9.0f} tok/s", flush=True)
    used = memory()
    if used:
        print("memory: " + ", ".join(f"{name} {size:.2f} GB" for name, size in used.items()))
    driver.close()
    return {
        "model": model.name,
        "device": config.device,
        "overlap_depth": config.overlap_depth,
        "page_size": config.page_size,
        "cuda_graph_max_bs": config.cuda_graph_max_bs,
        "start_s": seconds,
        "decode": [asdict(row) for row in decode],
        "prefill": [asdict(row) for row in prefill],
        "gaps": None if gaps is None else asdict(gaps),
        "memory_gb": used,
        "machine": machine(),
    }


def main(arguments: list[str] | None = None) -> None:
    run_tool(parse(arguments), measure)


if __name__ == "__main__":
    main()
