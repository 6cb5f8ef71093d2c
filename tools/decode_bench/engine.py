"""What the benchmarks of a whole scheduler share: the options of the engine they build, and what the machine says."""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from engine.bench.options import count
from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulePolicy, SchedulerOptions
from engine.errors import EngineError
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from scheduler_proc.settle import settle
from tools.decode_bench.driver import Driver
from tools.decode_bench.measure import prompts_of
from tools.decode_bench.shapes import SHAPES, dummy_model, shaped_model

_FIRST_PROMPT = 64


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Which model runs, and how."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--shape", choices=SHAPES, default="tiny", help="made-up weights; default: %(default)s")
    which.add_argument("--model", help="a real model, or a directory with only a config.json")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "delayed", "null"], default="auto")
    parser.add_argument("--dtype", default="bfloat16", help="default: %(default)s")
    parser.add_argument("--overlap-depth", type=int, choices=[0, 1, 2], help="default: the device's own")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--page-size", type=count, help="default: the device's own")
    parser.add_argument("--schedule-policy", choices=get_args(SchedulePolicy), default="fcfs", help="who is first")
    parser.add_argument("--chunked-prefill-size", type=count, help="default: the device's own")
    parser.add_argument("--mixed-chunk-size", type=count, help="default: the device's own")
    parser.add_argument("--cpu-threads", type=count)
    parser.add_argument("--json", type=Path, help="write all figures to this file")


def find_model(options: argparse.Namespace, folder: Path) -> ModelFiles:
    """Raises EngineError if --model cannot be had."""
    if options.model is None:
        return shaped_model(options.shape, folder)
    path = Path(options.model)
    if (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return dummy_model(path.name, path)
    return resolve(options.model)


def configure(
    options: argparse.Namespace,
    max_running_requests: int,
    max_total_tokens: int | None,
    *,
    disable_radix_cache: bool = False,
) -> EngineConfig:
    """The options of add_engine_options as a configuration; a pool of None is the device's own. Raises ConfigError."""
    return settle(
        EngineConfig(
            model=ModelOptions(dtype=options.dtype),
            scheduler=SchedulerOptions(
                device=options.device,
                max_running_requests=max_running_requests,
                max_total_tokens=max_total_tokens,
                page_size=options.page_size,
                chunked_prefill_size=options.chunked_prefill_size,
                mixed_chunk_size=options.mixed_chunk_size,
                overlap_depth=options.overlap_depth,
                disable_cuda_graph=options.disable_cuda_graph,
                disable_radix_cache=disable_radix_cache,
                deterministic=options.deterministic,
                schedule_policy=options.schedule_policy,
            ),
            process=ProcessOptions(cpu_threads=options.cpu_threads),
        )
    )


def start(config: EngineConfig, model: ModelFiles, folder: Path) -> tuple[Driver, dict[str, float]]:
    """A driver that has answered once, and the seconds of each part of that, which are printed too."""
    driver = Driver(config, model, folder)
    begin = time.perf_counter()
    driver.seconds(prompts_of(1, _FIRST_PROMPT, seed=1), 4)
    seconds = {"build": driver.build_s, **driver.stages, "first_request": time.perf_counter() - begin}
    print("start: " + ", ".join(f"{name} {taken:.2f} s" for name, taken in seconds.items()), flush=True)
    return driver, seconds


def memory() -> dict[str, float]:
    """GB of the CUDA device by torch's count, and in all; empty without one."""
    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "most_allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "used": total - free,
        "total": total,
    }
    return {name: size / 1e9 for name, size in found.items()}


def release() -> None:
    """Give the memory of an engine that is gone back to the CUDA device, for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def machine() -> dict[str, str | int | None]:
    """What figures are of."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }


def run_tool(options: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], dict[str, Any]]) -> None:
    """Measure, in a folder that is gone afterwards, and write the figures where --json says."""
    _show_log()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            figures = measure(options, Path(folder))
        except EngineError as error:
            raise SystemExit(str(error)) from error
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def _show_log() -> None:
    """Warnings on the terminal, or what the variable LOG_LEVEL says."""
    shown = logging.StreamHandler()
    # Of the handler, not of the loggers: the driver listens to how long the parts of a start take.
    shown.setLevel(os.environ.get("LOG_LEVEL", "WARNING").upper())
    logging.basicConfig(handlers=[shown])
