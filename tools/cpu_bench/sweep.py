"""llama-server's best settings for each stage: one setting after the other, keeping what is faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tools.cpu_bench.measure import Outcome, Workload, measure, say
from tools.cpu_bench.servers import LLAMA_AXES, LLAMA_DEFAULT, Llama, Stage

_WORTH = 1.02
"""Gain that a choice must bring over the best so far: less is noise in runs this short."""


class Tried(msgspec.Struct, frozen=True):
    """One setting tried at one stage."""

    model: str
    stage: str
    choices: dict[str, str]
    rate: float
    others_cores: float
    """As in Outcome: above a tenth, this rate says little."""


def sweep_llama(llama: Llama, workload: Workload, logs: Path) -> tuple[dict[str, dict[str, str]], list[Tried]]:
    """Stage key -> best choices, and all that was tried. Settings that fail count as 0."""
    best: dict[str, dict[str, str]] = {}
    tried: list[Tried] = []
    for stage, num_requests in zip(workload.stages, workload.requests, strict=True):
        chosen, rate = dict(LLAMA_DEFAULT), 0.0
        for choices in _first_and_changes(stage, chosen):
            one = _try(llama, choices, stage, num_requests, workload, logs)
            tried.append(one)
            say(f"sweep {one.model} {one.stage}: {one.rate:.1f} tok/s with {shown(choices)}")
            if one.rate > rate * _WORTH:
                chosen.update(choices)
                rate = one.rate
        best[stage.key] = chosen
    return best, tried


def _first_and_changes(stage: Stage, chosen: dict[str, str]) -> Iterator[dict[str, str]]:
    """The start, then every single change of `chosen`, which the caller updates in between."""
    yield dict(chosen)
    for name, options in LLAMA_AXES.items():
        if name == "kv" and stage.concurrency == 1:
            continue
        for choice in options:
            if choice != LLAMA_DEFAULT[name]:
                yield {**chosen, name: choice}


def _try(
    llama: Llama, choices: dict[str, str], stage: Stage, num_requests: int, workload: Workload, logs: Path
) -> Tried:
    one = Llama("sweep", llama.model, llama.executable, llama.extra, {stage.key: choices})
    only = msgspec.structs.replace(workload, stages=(stage,), requests=(num_requests,))
    outcomes = [found for found in measure(one, only, 0, logs) if isinstance(found, Outcome)]
    usable = [outcome for outcome in outcomes if not outcome.errors and not outcome.misshapen]
    rate, others_cores = (usable[0].rate, usable[0].others_cores) if usable else (0.0, 0.0)
    return Tried(llama.model.label, stage.key, choices, rate, others_cores)


def shown(choices: dict[str, str]) -> str:
    """The settings in a line."""
    return ", ".join(f"{name} {choice}" for name, choice in choices.items())
