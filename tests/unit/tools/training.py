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


def drafts_seen(harness: Harness, text: Text) -> list[tuple[int, list[int]]]:
    """What is drafted for the answer that a text has, which it must get: tokens known, and the drafts behind them."""
    assert isinstance(harness.device, CpuDevice)
    verifier = harness.device._runner.verifier
    assert verifier is not None
    seen: list[tuple[int, list[int]]] = []
    draft = verifier.drafter.draft

    def spy(*arguments: object) -> object:
        drafts = draft(*arguments)  # type: ignore[arg-type]
        seen.append((int(harness.slots.num_known[0]), drafts.tokens[0].tolist()))
        return drafts

    verifier.drafter.draft = spy  # type: ignore[method-assign, assignment]
    harness.add(1, text.ids[: text.prompt_len].tolist(), max_tokens=ANSWER)
    harness.run()
    assert harness.tokens[1] == text.ids[text.prompt_len :].tolist() and len(seen) > 10
    return seen
