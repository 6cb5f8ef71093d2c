"""What is measured: decode steps at batch sizes, prompts of lengths; and what the memory's bandwidth allows."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from engine.model_files.types import ModelConfig
from scheduler_proc.process import StepTimes
from tools.decode_bench.driver import Driver
from tools.decode_bench.shapes import token_bytes, weight_bytes

REPEATS = 3
PROMPT_IDS = 10_000
"""Prompts are random ids below this."""
SETTLE_STEPS = 8
"""Steps after the last prompt that do not count as steady yet."""


@dataclass(frozen=True)
class DecodeRow:
    """A batch of equal contexts, each of which decodes `steps` tokens."""

    batch: int
    ms_per_step: float
    """(time for steps + 1 tokens - time for one token) / steps, the median."""
    tokens_per_s: float
    steady_ms: float
    """A turn of the loop while all rows decode, the mean."""
    floor_ms: float | None
    """What reading weights and context takes; None where no bandwidth is known."""
    share: float | None
    """floor_ms / ms_per_step"""
    host_us: dict[str, float]
    """Of a steady step, by part of the loop; `collect` holds the wait for the device."""
    cached_tokens: int
    """The fewest prompt tokens that a measured request found cached."""


@dataclass(frozen=True)
class PrefillRow:
    """One request with fresh ids and one token of answer."""

    num_tokens: int
    ms: float
    tokens_per_s: float


def prompts_of(count: int, length: int, seed: int | list[int]) -> list[np.ndarray]:
    """int32 ids of `count` prompts."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, PROMPT_IDS, (count, length)).astype(np.int32))


def floor_ms(model: ModelConfig, batch: int, context: int, steps: int, gb_per_s: float) -> float:
    """Milliseconds of a step that does nothing but read its bf16 weights and keys and values once."""
    size = weight_bytes(model) + batch * (context + steps / 2) * token_bytes(model)
    return size / gb_per_s / 1e6


def measure_decode(
    driver: Driver,
    model: ModelConfig,
    prompts: list[np.ndarray],
    steps: int,
    gb_per_s: float | None,
) -> DecodeRow:
    """Decode a batch of prompts of one length, which are cached first."""
    batch, context = len(prompts), len(prompts[0])
    driver.seconds(prompts, 1)
    driver.seconds(prompts, steps + 1)
    driver.outlet.cached_tokens.clear()
    taken = [driver.seconds(prompts, steps + 1) - driver.seconds(prompts, 1) for _ in range(REPEATS)]
    cached = min(driver.outlet.cached_tokens)
    steady_s, times = _steady(driver, prompts, steps)
    ms = statistics.median(taken) / steps * 1e3
    floor = None if gb_per_s is None else floor_ms(model, batch, context, steps, gb_per_s)
    return DecodeRow(
        batch=batch,
        ms_per_step=ms,
        tokens_per_s=batch / ms * 1e3,
        steady_ms=steady_s * 1e3,
        floor_ms=floor,
        share=None if floor is None else floor / ms,
        host_us={part: getattr(times, part) / times.steps / 1e3 for part in ("plan", "launch", "collect", "send")},
        cached_tokens=cached,
    )


def start_batch(driver: Driver, prompts: list[np.ndarray], max_tokens: int) -> None:
    """Start a batch and turn until all of it decodes, undisturbed by prompts.

    Raises RuntimeError if it never does: memory or slots are too few.
    """
    driver.ask(prompts, max_tokens)
    scheduler = driver.scheduler
    scheduler.turn()
    while len(scheduler.workload.slots.decode().rows) < len(prompts):
        scheduler.turn()
        if scheduler.idle:
            raise RuntimeError(f"a batch of {len(prompts)} never ran as a whole")
    for _ in range(SETTLE_STEPS):
        scheduler.turn()


def _steady(driver: Driver, prompts: list[np.ndarray], steps: int) -> tuple[float, StepTimes]:
    """Seconds of a turn in which all rows decode, and where the loop spends them."""
    scheduler = driver.scheduler
    start_batch(driver, prompts, steps + 1 + SETTLE_STEPS + _waves(driver, prompts))
    scheduler.times = StepTimes()
    begin = time.perf_counter()
    # The oldest row is the first to end, some steps before the others.
    while len(scheduler.workload.slots.decode().rows) == len(prompts):
        scheduler.turn()
    taken, times = time.perf_counter() - begin, scheduler.times
    driver.finish()
    return taken / times.steps, times


def _waves(driver: Driver, prompts: list[np.ndarray]) -> int:
    """Steps that the prompts' uncached ends may take: so long the first row decodes before all do."""
    per_step = driver.scheduler.workload.planner.options.step_tokens
    return -(-2 * len(prompts) * driver.scheduler.workload.cache.page_size // per_step) + 2


def measure_prefill(driver: Driver, length: int, seed: int) -> PrefillRow:
    """One request at a time on an idle engine, the median; the first one does not count."""
    prompts = prompts_of(REPEATS + 1, length, seed)
    taken = [driver.seconds([prompt], 1) for prompt in prompts]
    seconds = statistics.median(taken[1:])
    return PrefillRow(length, seconds * 1e3, length / seconds)
