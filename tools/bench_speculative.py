"""Output tokens per second with and without drafts, through the whole scheduler in this process: no HTTP.

    PYTHONPATH=. python tools/bench_speculative.py --batch 1 4 16 64 --json speculative.json
    PYTHONPATH=. python tools/bench_speculative.py --methods NGRAM EAGLE3 --draft-model-path EAGLE3=head --device cpu

Chats of generated prompts whose topics no head was trained on (tools/draft_training/prompts.py), answered greedily, as
many at a time as --batch says, each time the same ones; the second of two rounds counts. `none` drafts nothing; a
method drafts as much as pays, and with `!` (NGRAM!) always as much as it may. Accept length: tokens of a row of a step
with drafts. Equal: answers with the same tokens as without drafts (in bfloat16 near ties may go either way).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.bench.options import count
from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions, SpeculativeOptions
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams
from scheduler_proc.settle import settle
from tools.decode_bench.driver import Driver
from tools.decode_bench.engine import machine, release, run_tool
from tools.draft_training.completions import Chats
from tools.draft_training.prompts import prompts

NONE = "none"
ROUNDS = 2


@dataclass(frozen=True)
class Row:
    """One figure."""

    method: str
    batch: int
    tokens_per_s: float
    accept_len: float
    """Of rows of steps with drafts; 1 where there were none."""
    drafting: float
    """Share of the tokens that came of steps with drafts."""
    equal: float
    """Share of the answers that are those without drafts."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the engine's default model")
    parser.add_argument("--methods", nargs="+", default=["NGRAM"], help="algorithms; default: %(default)s")
    parser.add_argument(
        "--draft-model-path", nargs="*", default=[], metavar="METHOD=PATH", help="of those that need one"
    )
    parser.add_argument("--batch", type=count, nargs="+", default=[1, 4, 16, 64], help="default: %(default)s")
    parser.add_argument("--num-prompts", type=count, default=16, help="at least; default: %(default)s")
    parser.add_argument("--max-tokens", type=count, default=160, help="of an answer; default: %(default)s")
    parser.add_argument("--num-draft-tokens", type=count, default=8, help="default: %(default)s")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", default="auto", help="default: %(default)s")
    parser.add_argument("--overlap-depth", type=int, choices=[0, 1, 2], help="default: the device's own")
    parser.add_argument("--cpu-threads", type=count)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace, method: str) -> EngineConfig:
    """An engine that drafts so. Raises ConfigError."""
    config = EngineConfig(
        model=ModelOptions(model=options.model, dtype=options.dtype),
        scheduler=SchedulerOptions(device=options.device, overlap_depth=options.overlap_depth),
        process=ProcessOptions(cpu_threads=options.cpu_threads),
    )
    if method != NONE:
        name = method.removesuffix("!")
        speculative = msgspec.convert(
            {
                "speculative_algorithm": name,
                "speculative_draft_model_path": dict(p.split("=", 1) for p in options.draft_model_path).get(name),
                "speculative_num_draft_tokens": options.num_draft_tokens,
                "speculative_adaptive": not method.endswith("!"),
            },
            SpeculativeOptions,
        )
        config = msgspec.structs.replace(config, speculative=speculative)
    return settle(config)


def answer(driver: Driver, asked: Sequence[np.ndarray], batch: int, max_tokens: int) -> tuple[list[list[int]], float]:
    """Greedy answers, `batch` at a time, and the seconds they took."""
    driver.outlet.answers = answers = {}
    numbers: list[int] = []
    begin = time.perf_counter()
    for first in range(0, len(asked), batch):
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1)
        numbers += [driver.request(prompt, sampling) for prompt in asked[first : first + batch]]
        driver.finish()
    seconds = time.perf_counter() - begin
    driver.outlet.answers = None
    return [answers[number] for number in numbers], seconds


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All figures. Raises EngineError."""
    model = resolve(options.model)
    chats, rows = Chats(model), []
    plain: dict[int, list[list[int]]] = {}
    print("method     batch    tok/s  gain  accept  drafting  equal", flush=True)
    for method in (NONE, *options.methods):
        rates = {row.batch: row.tokens_per_s for row in rows if row.method == NONE}
        for row in _of_method(options, model, chats, method, plain, folder):
            rows.append(row)
            gain = row.tokens_per_s / rates.get(row.batch, row.tokens_per_s)
            print(
                f"{row.method:10} {row.batch:5} {row.tokens_per_s:8.1f} {gain:5.2f} {row.accept_len:7.2f} "
                f"{row.drafting:9.1%} {row.equal:6.1%}",
                flush=True,
            )
        release()
    return {"machine": machine(), "rows": [asdict(row) for row in rows]}


def _of_method(
    options: argparse.Namespace,
    model: ModelFiles,
    chats: Chats,
    method: str,
    plain: dict[int, list[list[int]]],
    folder: Path,
) -> list[Row]:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        driver = Driver(configure(options, method), model, Path(own))
        workload, rows = driver.scheduler.workload, []
        try:
            for batch in options.batch:
                asked = chats.of(prompts(max(options.num_prompts, batch), 1, "held_topic"))
                answers, seconds = [], 0.0
                before = (0, 0)
                for _ in range(ROUNDS):
                    driver.flush()
                    before = (workload.num_verified, workload.num_accepted)
                    answers, seconds = answer(driver, asked, batch, options.max_tokens)
                verified, accepted = workload.num_verified - before[0], workload.num_accepted - before[1]
                same = plain.setdefault(batch, answers)
                total = sum(map(len, answers))
                equal = sum(a == b for a, b in zip(answers, same, strict=True)) / len(answers)
                length = 1 + accepted / max(verified, 1)
                rows.append(Row(method, batch, total / seconds, length, (verified + accepted) / total, equal))
        finally:
            driver.close()
    return rows


def main(arguments: list[str] | None = None) -> None:
    run_tool(parse(arguments), measure)


if __name__ == "__main__":
    main()
