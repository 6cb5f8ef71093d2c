"""The invariance matrix: the same requests through many configurations, compared token by token.

A difference is allowed only where the reference's best two logits lie within 1e-4 of each other at the first
differing token; each such place is printed, and more than one row in 200 fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions, SpeculativeOptions
from engine.model_files.types import ModelFiles
from scheduler_proc.worker.cpu import CpuDevice
from tests.support.scheduler import Harness

CLOSE = 1e-4
LENGTHS = [1, 2, 15, 16, 17, 31, 40, 64, 65, 90, 5, 33]
"""Tokens of the prompts that most of the matrix is run with: around the ends of pages and of chunks."""
TOKENS = 24
"""Of their answers."""


@dataclass
class Case:
    """One request of the matrix."""

    prompt: list[int]
    max_tokens: int
    sampling: dict = field(default_factory=dict)


@dataclass
class Reference:
    """What a request gives alone, and how far the best two logits were apart at each of its tokens."""

    tokens: list[int]
    gaps: list[float]


def config(*, threads: int = 1, model: ModelOptions | None = None, **options: object) -> EngineConfig:
    """An engine configuration for the matrix; keys are SchedulerOptions."""
    base: dict = {"device": "cpu", "max_total_tokens": 8192, "max_running_requests": 16}
    return EngineConfig(
        model=model or ModelOptions(),
        scheduler=SchedulerOptions(**{**base, **options}),
        process=ProcessOptions(cpu_threads=threads),
    )


def drafting_with(algorithm: str, drafter: str, top_k: int, **options: object) -> EngineConfig:
    """What is in a directory drafts in every step, three tokens deep, or a block; options as for `config`."""
    speculative = SpeculativeOptions(
        speculative_algorithm=algorithm,
        speculative_draft_model_path=drafter,
        speculative_num_steps=3,
        speculative_eagle_topk=top_k,
        speculative_num_draft_tokens=4 if top_k == 1 else 7,
        speculative_dflash_block_size=6,
        speculative_adaptive=False,
    )
    return msgspec.structs.replace(config(**options), speculative=speculative)


def cases(vocab_size: int, lengths: list[int], max_tokens: int, seed: int = 0) -> list[Case]:
    """Random prompts of the given lengths; every third one samples with a seed, others change their logits."""
    rng = np.random.default_rng(seed)
    made = []
    for index, length in enumerate(lengths):
        sampling = {"temperature": 0.8, "top_p": 0.9, "seed": 100 + index} if index % 3 == 2 else {}
        if index % 3 == 1:
            sampling = {"repetition_penalty": 1.3, "logit_bias": ((5, 0.5), (6, -0.5))}
        made.append(Case(rng.integers(3, vocab_size, length).tolist(), max_tokens, sampling))
    return made


def references(
    tmp_path: Path, model: ModelFiles, made: list[Case], threads: int = 1, options: ModelOptions | None = None
) -> list[Reference]:
    """Each case alone: whole prompt in one step, page size 16, depth 0."""
    harness = Harness.of_model(tmp_path, config(threads=threads, model=options, chunked_prefill_size=4096), model)
    gaps: list[float] = []
    assert isinstance(harness.device, CpuDevice)
    decoder = harness.device._runner.decoder
    logits = decoder.logits

    def spy(hidden: torch.Tensor) -> torch.Tensor:
        values = logits(hidden)
        best = values.topk(2, dim=-1).values
        gaps.extend((best[:, 0] - best[:, 1]).tolist())
        return values

    decoder.logits = spy  # type: ignore[method-assign]
    found = []
    for number, case in enumerate(made, start=1):
        gaps.clear()
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
        harness.run()
        found.append(Reference(harness.tokens[number], list(gaps)))
    return found


def run_together(harness: Harness, made: list[Case], stagger: int = 0) -> list[list[int]]:
    """All cases at once, a new one every `stagger` turns."""
    for number, case in enumerate(made, start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
        harness.turn(stagger)
    harness.run()
    assert not harness.errors
    harness.device.close()
    return [harness.tokens[number] for number in range(1, len(made) + 1)]


def assert_same(label: str, expected: list[Reference], got: list[list[int]]) -> None:
    """Compare; explains every difference."""
    close = 0
    for row, (reference, tokens) in enumerate(zip(expected, got, strict=True)):
        if tokens == reference.tokens:
            continue
        assert len(tokens) == len(reference.tokens), f"{label}: row {row} has {len(tokens)} tokens"
        at = next(i for i, (a, b) in enumerate(zip(reference.tokens, tokens, strict=True)) if a != b)
        print(f"{label}: row {row} differs at token {at}; the best two logits were {reference.gaps[at]:.2e} apart")
        assert reference.gaps[at] <= CLOSE, f"{label}: row {row} differs at token {at}"
        close += 1
    assert close <= len(expected) / 200, f"{label}: {close} rows hang on a near tie"
