"""One contender's stages: start, warm up, measure, stop."""

from __future__ import annotations

import asyncio
import itertools
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

from tools.cpu_bench.load import Answer, Level, Target, ask, run_level, session
from tools.cpu_bench.process import Launch, Server, ServerFailed, cpu_seconds, machine_cpu_seconds
from tools.cpu_bench.prompts import Prompts
from tools.cpu_bench.servers import Contender, Stage

_WARM_TOKENS = 8
_MACHINE = "machine"
_SETTLE_S = 1.0
BUSY_CORES = 0.1
"""Use of the machine by others from which a rate is in doubt."""
_UNSAFE = re.compile(r"[^\w.-]+")


class Workload(msgspec.Struct, frozen=True):
    """What is asked of every server alike."""

    stages: tuple[Stage, ...]
    requests: tuple[int, ...]
    """Requests per stage, [num_stages]."""
    prompts: Prompts
    chat: bool = False
    cpu_stage: str = ""
    """Key of the stage at which our processes' CPU time is taken; "" for none."""
    idle_s: float = 0.0
    """How long our server's idle CPU use is watched, once per contender; 0 for not at all."""
    stage_timeout_s: float = 300.0


class Outcome(msgspec.Struct, frozen=True):
    """One stage of one contender in one round."""

    contender: str
    stage: str
    round: int
    command: str
    rate: float
    """Output tokens per second; of the prefill stage, prompt tokens per second to the first token, median."""
    ttft_p50_s: float
    requests: int
    errors: tuple[str, ...]
    misshapen: int
    """Answers of another length than the one asked for."""
    prompt_tokens: float
    """Mean of a request, as the server counts them."""
    cached_share: float
    wall_s: float
    start_s: float
    others_cores: float = 0.0
    """Cores that neither the server nor this tool used, but others did, during the stage."""
    cpu_s: dict[str, float] = {}
    """Of ours, CPU seconds during the watched stage, by process; `client` is this tool itself."""
    idle_share: dict[str, float] = {}
    """CPU use of the idle server after the last stage, by process, in cores."""


class Failure(msgspec.Struct, frozen=True):
    """A contender that could not be measured, and why."""

    contender: str
    round: int
    stages: tuple[str, ...]
    reason: str


def say(text: str) -> None:
    """A line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def measure(
    contender: Contender, workload: Workload, turn: int, logs: Path, *, idle: bool = False
) -> Iterator[Outcome | Failure]:
    """All stages of one contender; stages with the same launch share a start. A server that fails costs its stages."""
    pairs = list(zip(workload.stages, workload.requests, strict=True))
    groups = [(launch, list(group)) for launch, group in itertools.groupby(pairs, lambda p: contender.launch(p[0]))]
    for number, (launch, group) in enumerate(groups):
        log = logs / f"{_UNSAFE.sub('-', contender.name)}-{turn}-{group[0][0].key}.log"
        watch_idle = idle and contender.ours and number == len(groups) - 1
        left = [stage.key for stage, _ in group]
        try:
            for outcome in _run_group(contender, launch, group, workload, turn, log, idle=watch_idle):
                left.remove(outcome.stage)
                yield outcome
        except ServerFailed as error:
            say(f"{contender.name}: {error}")
            yield Failure(contender.name, turn, tuple(left), str(error))


def _run_group(
    contender: Contender,
    launch: Launch,
    group: Sequence[tuple[Stage, int]],
    workload: Workload,
    turn: int,
    log: Path,
    *,
    idle: bool,
) -> Iterator[Outcome]:
    say(f"{contender.name}: starting {launch.shown()}")
    with Server(launch, log) as server:
        target = Target(server.url, server.model_name(), workload.chat)
        for index, (stage, num_requests) in enumerate(group):
            watched = stage.key == workload.cpu_stage and contender.ours
            run = _run_stage(server, target, stage, num_requests, workload.prompts, turn, watched)
            try:
                outcome = asyncio.run(asyncio.wait_for(run, workload.stage_timeout_s))
            except TimeoutError:
                raise server.failure(f"not done with {stage.key} after {workload.stage_timeout_s:.0f} s") from None
            server.check()
            outcome = msgspec.structs.replace(
                outcome, contender=contender.name, command=launch.shown(), start_s=server.start_s
            )
            say(f"{contender.name}: {told(outcome)}")
            if idle and workload.idle_s and index == len(group) - 1:
                outcome = msgspec.structs.replace(outcome, idle_share=_idle(server, workload.idle_s))
            yield outcome


async def _run_stage(
    server: Server, target: Target, stage: Stage, num_requests: int, prompts: Prompts, turn: int, watched: bool
) -> Outcome:
    # Warm: pages, thread pools and compiled shapes of this batch size; its prompts do not come back.
    warm = prompts.texts(f"warm/{turn}/{stage.key}", stage.concurrency, stage.prompt_tokens)
    await run_level(target, warm, stage.concurrency, min(_WARM_TOKENS, stage.output_tokens))
    texts = prompts.texts(f"{turn}/{stage.key}", num_requests, stage.prompt_tokens)
    before, begin = _cpu(server), time.monotonic()
    if stage.prefill:
        outcome = prefill_outcome(stage, await _one_by_one(target, texts), turn)
    else:
        outcome = level_outcome(stage, await run_level(target, texts, stage.concurrency, stage.output_tokens), turn)
    spent = _difference(before, _cpu(server))
    others = (2 * spent[_MACHINE] - sum(spent.values())) / (time.monotonic() - begin)
    outcome = msgspec.structs.replace(outcome, others_cores=max(0.0, others))
    if watched:
        del spent[_MACHINE]
        outcome = msgspec.structs.replace(outcome, cpu_s=spent)
    return outcome


def _cpu(server: Server) -> dict[str, float]:
    return {**cpu_seconds(server.pid), "client": time.process_time(), _MACHINE: machine_cpu_seconds()}


async def _one_by_one(target: Target, texts: Sequence[str]) -> list[Answer]:
    async with session(1) as http:
        return [await ask(http, target, text, 1) for text in texts]


def level_outcome(stage: Stage, level: Level, turn: int) -> Outcome:
    """The figures of a closed-loop level, without the contender's name yet."""
    return _outcome(stage, level.answers, turn, level.output_rate, level.num_misshapen, level.wall_s)


def prefill_outcome(stage: Stage, answers: Sequence[Answer], turn: int) -> Outcome:
    """The figures of single long prompts, without the contender's name yet."""
    good = [answer for answer in answers if not answer.error]
    rate = median(answer.prompt_tokens / answer.ttft_s for answer in good) if good else 0.0
    misshapen = sum(answer.output_tokens != stage.output_tokens for answer in good)
    return _outcome(stage, answers, turn, rate, misshapen, sum(answer.total_s for answer in answers))


def _outcome(stage: Stage, answers: Sequence[Answer], turn: int, rate: float, misshapen: int, wall_s: float) -> Outcome:
    good = [answer for answer in answers if not answer.error]
    prompt_tokens = sum(answer.prompt_tokens for answer in good)
    return Outcome(
        contender="",
        stage=stage.key,
        round=turn,
        command="",
        rate=rate,
        ttft_p50_s=median(answer.ttft_s for answer in good) if good else 0.0,
        requests=len(answers),
        errors=tuple(answer.error for answer in answers if answer.error),
        misshapen=misshapen,
        prompt_tokens=prompt_tokens / len(good) if good else 0.0,
        cached_share=sum(answer.cached_tokens for answer in good) / prompt_tokens if prompt_tokens else 0.0,
        wall_s=wall_s,
        start_s=0.0,
    )


def told(outcome: Outcome) -> str:
    """One stage in a line."""
    what = "prompt tok/s" if outcome.stage == "prefill" else f"tok/s at {outcome.stage}"
    line = f"{outcome.rate:.1f} {what}, TTFT p50 {outcome.ttft_p50_s * 1000:.0f} ms, {outcome.wall_s:.1f} s"
    return "; ".join([line, *doubts(outcome)])


def doubts(outcome: Outcome) -> list[str]:
    """What makes an outcome incomparable."""
    found = []
    if outcome.errors:
        found.append(f"{len(outcome.errors)} of {outcome.requests} requests failed ({outcome.errors[0]})")
    if outcome.misshapen:
        found.append(f"{outcome.misshapen} answers of the wrong length")
    if outcome.cached_share > 0.05:
        found.append(f"{outcome.cached_share:.0%} of the prompt tokens came from a cache")
    if outcome.others_cores > BUSY_CORES:
        found.append(f"others used {outcome.others_cores:.2f} cores meanwhile")
    return found


def _idle(server: Server, seconds: float) -> dict[str, float]:
    time.sleep(min(_SETTLE_S, seconds))
    before, begin = cpu_seconds(server.pid), time.monotonic()
    time.sleep(seconds)
    spent = _difference(before, cpu_seconds(server.pid))
    return {name: value / (time.monotonic() - begin) for name, value in spent.items()}


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
