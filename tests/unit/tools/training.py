"""What tests of training share: a tiny model's answers."""

from __future__ import annotations

import numpy as np

from scheduler_proc.worker.cpu import CpuDevice
from tests.support.scheduler import Harness
from tools.draft_training.fit import Text
from tools.draft_training.target import Target

ANSWER = 40


def target_of(harness: Harness) -> Target:
    assert isinstance(harness.device, CpuDevice)
    return Target(harness.device._runner.decoder)


def answered(harness: Harness, count: int, seed: int) -> list[Text]:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 60, int(rng.integers(4, 20))).tolist() for _ in range(count)]
    for number, prompt in enumerate(prompts, start=1000 * (seed + 1)):
        harness.add(number, prompt, max_tokens=ANSWER)
    harness.run()
    return [
        Text(np.array([*prompt, *harness.tokens[number]], np.int32), len(prompt))
        for number, prompt in enumerate(prompts, start=1000 * (seed + 1))
    ]
