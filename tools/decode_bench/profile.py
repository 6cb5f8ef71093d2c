"""Records steady decode steps with torch's profiler."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from tools.decode_bench.driver import Driver, unmarked
from tools.decode_bench.measure import start_batch

STEPS = 20
WARM_STEPS = 5
"""Steps that the profiler sees before it keeps any: its own start is slow."""
ROOM = 200
"""Tokens that an answer may have: enough for all of it, whoever of the batch began first."""


def record_steps(driver: Driver, prompts: list[np.ndarray], path: Path) -> None:
    """Write a Chrome trace of STEPS decode steps of a batch to `path` (.json or .json.gz)."""
    start_batch(driver, prompts, ROOM)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    driver.device.mark = record_function
    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARM_STEPS, active=STEPS, repeat=1),
        on_trace_ready=lambda found: found.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(WARM_STEPS + STEPS):
            driver.scheduler.turn()
            profiler.step()
    driver.device.mark = unmarked
    driver.finish()
