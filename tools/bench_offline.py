"""Many requests at once through the whole scheduler, in this process: no HTTP, no detokenizer.

    PYTHONPATH=. python tools/bench_offline.py --shape 8b --json offline.json
    PYTHONPATH=. python tools/bench_offline.py --recipe mixed --shape tiny --device cpu --num-requests 8

mixed: prompts and answers of 100 to 1,024 tokens each. prefix: prompts with the same 2,048 tokens and then 128 of
their own, answers of 32 tokens; cold (nothing is cached), warm (the shared part is), and without a prefix cache. Time
is from the call to the last token of the last request. The prefix cache is emptied before each run but the warm ones.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.bench.options import count
from engine.config import EngineConfig
from engine.model_files.types import ModelFiles
from tools.decode_bench.driver import Driver
from tools.decode_bench.engine import (
    add_engine_options,
    configure,
    find_model,
    machine,
    memory,
    release,
    run_tool,
    start,
)
from tools.decode_bench.measure import prompts_of

RECIPES = ("mixed", "prefix")
REQUESTS = 256
LEAST_LEN, MOST_LEN, MOST_ID = 100, 1024, 10_000
MIXED_TOKENS = (142_827, 133_966)
"""In and out, of REQUESTS requests: who measures the same load has the same sums."""
SHARED_LEN, OWN_LEN, ANSWER_LEN = 2048, 128, 32


@dataclass(frozen=True)
class Run:
    """One measured load."""

    name: str
    num_requests: int
    seconds: float
    input_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    cached_tokens: int
    """Of the input: found in the prefix cache."""
    steps: int
    retractions: int


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine_options(parser)
    parser.add_argument("--recipe", nargs="+", choices=RECIPES, default=RECIPES, help="default: both")
    parser.add_argument("--num-requests", type=count, default=REQUESTS, help="default: %(default)s")
    parser.add_argument("--repeats", type=count, default=3, help="runs of each load; default: %(default)s")
    parser.add_argument("--max-running-requests", type=count, help="default: all of them")
    parser.add_argument("--max-total-tokens", type=count, help="default: the device's own")
    return parser.parse_args(arguments)


def mixed_load(num_requests: int) -> tuple[list[np.ndarray], list[int]]:
    """Prompts (int32 ids) and lengths of answers, the same every time."""
    rng = random.Random(0)
    prompts = [
        np.array([rng.randint(0, MOST_ID) for _ in range(rng.randint(LEAST_LEN, MOST_LEN))], np.int32)
        for _ in range(num_requests)
    ]
    answers = [rng.randint(LEAST_LEN, MOST_LEN) for _ in range(num_requests)]
    if num_requests == REQUESTS:
        assert (sum(map(len, prompts)), sum(answers)) == MIXED_TOKENS
    return prompts, answers


def prefix_load(num_requests: int, shared_seed: int, own_seed: int) -> list[np.ndarray]:
    """Prompts (int32 ids) that begin alike."""
    (shared,) = prompts_of(1, SHARED_LEN, [0, shared_seed])
    return [np.concatenate([shared, own]) for own in prompts_of(num_requests, OWN_LEN, [1, own_seed])]


def run(driver: Driver, name: str, prompts: list[np.ndarray], answers: Sequence[int]) -> Run:
    """All at once, to the end; printed as a line."""
    workload = driver.scheduler.workload
    before = workload.stats(0)
    seconds = driver.seconds(prompts, answers)
    after = workload.stats(0)
    output_tokens = after.output_tokens - before.output_tokens
    found = Run(
        name=name,
        num_requests=len(prompts),
        seconds=seconds,
        input_tokens=after.prompt_tokens - before.prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / seconds,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        steps=after.step - before.step,
        retractions=after.retractions - before.retractions,
    )
    # Anything else would make the time that of another load.
    assert (found.input_tokens, output_tokens) == (sum(map(len, prompts)), sum(answers))
    print(
        f"{name:>11} {seconds:8.2f} s {found.output_tokens_per_s:9.0f} tok/s {found.input_tokens:8} in"
        f" {output_tokens:7} out {found.cached_tokens:8} cached {found.steps:6} steps {found.retractions:4} retracted",
        flush=True,
    )
    return found


def measure_mixed(driver: Driver, options: argparse.Namespace) -> list[Run]:
    prompts, answers = mixed_load(options.num_requests)
    runs = []
    for _ in range(options.repeats):
        driver.flush()
        runs.append(run(driver, "mixed", prompts, answers))
    return runs


def measure_prefix(driver: Driver, options: argparse.Namespace) -> list[Run]:
    answers = [ANSWER_LEN] * options.num_requests
    runs = []
    for repeat in range(options.repeats):
        driver.flush()
        for which, name in enumerate(("cold", "warm")):
            prompts = prefix_load(options.num_requests, repeat, 2 * repeat + which)
            runs.append(run(driver, name, prompts, answers))
    return runs


def measure_without_cache(driver: Driver, options: argparse.Namespace) -> list[Run]:
    answers = [ANSWER_LEN] * options.num_requests
    return [
        run(driver, "radix off", prefix_load(options.num_requests, repeat, 2 * repeat), answers)
        for repeat in range(options.repeats)
    ]


Measure = Callable[[Driver, argparse.Namespace], list[Run]]
MEASURES: dict[str, Measure] = {"mixed": measure_mixed, "prefix": measure_prefix}
"""Of an engine with a prefix cache, by recipe."""


def with_engine(
    options: argparse.Namespace, config: EngineConfig, model: ModelFiles, measures: Sequence[Measure]
) -> dict[str, Any]:
    """Build an engine, measure, and let go of it; its figures. Raises EngineError where it cannot start."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        driver, seconds = start(config, model, Path(folder))
        runs = [found for measure in measures for found in measure(driver, options)]
        figures = {"start_s": seconds, "runs": [asdict(found) for found in runs], "memory_gb": memory()}
        driver.close()
    return figures


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that was asked for, printed as it comes. Raises EngineError where the engine cannot start."""
    model = find_model(options, folder)
    rows = options.max_running_requests or options.num_requests
    config = configure(options, rows, options.max_total_tokens)
    measures: list[Measure] = [MEASURES[recipe] for recipe in options.recipe]
    engines = [with_engine(options, config, model, measures)]
    if "prefix" in options.recipe:
        release()
        config = configure(options, rows, options.max_total_tokens, disable_radix_cache=True)
        engines.append(with_engine(options, config, model, [measure_without_cache]))
    runs = [found for engine in engines for found in engine["runs"]]
    for name in dict.fromkeys(found["name"] for found in runs):
        every = [found for found in runs if found["name"] == name]
        seconds, rate = (
            statistics.median(found[field] for found in every) for field in ("seconds", "output_tokens_per_s")
        )
        print(f"{name:>11} {seconds:8.2f} s {rate:9.0f} tok/s, the median of {len(every)}")
    return {
        "model": model.name,
        "device": config.device,
        "overlap_depth": config.overlap_depth,
        "page_size": config.page_size,
        "engines": engines,
        "machine": machine(),
    }


def main(arguments: list[str] | None = None) -> None:
    run_tool(parse(arguments), measure)


if __name__ == "__main__":
    main()
