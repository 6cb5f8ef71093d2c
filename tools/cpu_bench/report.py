"""Tables of medians, spreads and ratios."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from tools.cpu_bench.measure import Failure, Outcome, doubts


class Spread(msgspec.Struct, frozen=True):
    """Median, least and most of some rounds."""

    median: float
    low: float
    high: float
    rounds: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(median(values), min(values), max(values), len(values))

    def shown(self, digits: int, scale: float = 1.0) -> str:
        middle, low, high = (f"{value * scale:.{digits}f}" for value in (self.median, self.low, self.high))
        return middle if self.rounds == 1 else f"{middle} ({low}-{high})"


class Ratio(msgspec.Struct, frozen=True):
    """Ours over a peer's rate at one stage, taken round by round."""

    ours: str
    peer: str
    stage: str
    ratio: Spread


class Summary(msgspec.Struct, frozen=True):
    """What the tables show, for the JSON file too."""

    rate: dict[str, dict[str, Spread]]
    """Contender -> stage -> tokens per second."""
    ttft_s: dict[str, dict[str, Spread]]
    ratios: tuple[Ratio, ...]
    cpu_s: dict[str, dict[str, float]]
    """Our contenders -> process -> CPU seconds at the watched stage, all rounds together."""
    cpu_wall_s: dict[str, float]
    idle_share: dict[str, dict[str, float]]


def summarise(outcomes: Sequence[Outcome], rivals: Iterable[tuple[str, str]]) -> Summary:
    """rivals: pairs (ours, peer) to be compared. An outcome with failed or misshapen answers counts all the same."""
    ratios = []
    for ours, peer in rivals:
        for stage in dict.fromkeys(outcome.stage for outcome in outcomes):
            mine, theirs = (_by_round(outcomes, name, stage) for name in (ours, peer))
            values = [mine[turn] / theirs[turn] for turn in mine if theirs.get(turn)]
            if values:
                ratios.append(Ratio(ours, peer, stage, Spread.of(values)))
    cpu_s: dict[str, dict[str, float]] = {}
    cpu_wall_s: dict[str, float] = {}
    for outcome in outcomes:
        if outcome.cpu_s:
            total = cpu_s.setdefault(outcome.contender, {})
            for name, seconds in outcome.cpu_s.items():
                total[name] = total.get(name, 0.0) + seconds
            cpu_wall_s[outcome.contender] = cpu_wall_s.get(outcome.contender, 0.0) + outcome.wall_s
    return Summary(
        rate=_spreads(outcomes, lambda outcome: outcome.rate),
        ttft_s=_spreads(outcomes, lambda outcome: outcome.ttft_p50_s),
        ratios=tuple(ratios),
        cpu_s=cpu_s,
        cpu_wall_s=cpu_wall_s,
        idle_share={outcome.contender: outcome.idle_share for outcome in outcomes if outcome.idle_share},
    )


def _by_round(outcomes: Sequence[Outcome], contender: str, stage: str) -> dict[int, float]:
    return {o.round: o.rate for o in outcomes if o.contender == contender and o.stage == stage}


def _spreads(outcomes: Sequence[Outcome], value: Callable[[Outcome], float]) -> dict[str, dict[str, Spread]]:
    found: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.contender, {}).setdefault(outcome.stage, []).append(value(outcome))
    return {name: {stage: Spread.of(values) for stage, values in stages.items()} for name, stages in found.items()}


def tables(summary: Summary, stages: Sequence[str], cpu_stage: str) -> str:
    """The summary as text."""
    levels = [stage for stage in stages if stage != "prefill"]
    parts = [
        _by_level("output tok/s, median (range), by concurrency", summary.rate, levels, 1, 1.0),
        _by_level("TTFT p50, ms, by concurrency", summary.ttft_s, levels, 0, 1000.0),
        _prefill(summary),
        _ratios(summary.ratios, stages),
    ]
    parts += [_cpu(name, summary, cpu_stage) for name in summary.cpu_s]
    parts += [_idle(name, shares) for name, shares in summary.idle_share.items()]
    return "\n\n".join(part for part in parts if part)


def troubles(outcomes: Sequence[Outcome], failures: Sequence[Failure], skipped: Sequence[str]) -> list[str]:
    """What the reader must know before believing the tables."""
    lines = [f"skipped: {reason}" for reason in skipped]
    lines += [
        f"failed: {failure.contender}, round {failure.round + 1}, {', '.join(failure.stages)}: {failure.reason}"
        for failure in failures
    ]
    for outcome in outcomes:
        if found := doubts(outcome):
            lines.append(f"{outcome.contender}, round {outcome.round + 1}, {outcome.stage}: {'; '.join(found)}")
    return lines


def _by_level(
    title: str, values: dict[str, dict[str, Spread]], levels: Sequence[str], digits: int, scale: float
) -> str:
    rows = [
        [name, *(found[level].shown(digits, scale) if level in found else "-" for level in levels)]
        for name, found in values.items()
        if any(level in found for level in levels)
    ]
    return _table(title, ["", *levels], rows)


def _prefill(summary: Summary) -> str:
    rows = [
        [name, found["prefill"].shown(0), summary.ttft_s[name]["prefill"].shown(0, 1000.0)]
        for name, found in summary.rate.items()
        if "prefill" in found
    ]
    return _table("one long prompt, 1 output token", ["", "prompt tok/s", "TTFT ms"], rows)


def _ratios(ratios: Sequence[Ratio], stages: Sequence[str]) -> str:
    cells = {
        (ratio.ours, ratio.peer): {r.stage: r.ratio for r in ratios if r.ours == ratio.ours and r.peer == ratio.peer}
        for ratio in ratios
    }
    rows = [
        [f"{ours} / {peer}", *(found[stage].shown(2) if stage in found else "-" for stage in stages)]
        for (ours, peer), found in cells.items()
    ]
    return _table("ours / peer, tok/s, median of the rounds' ratios (range)", ["", *stages], rows)


def _cpu(name: str, summary: Summary, cpu_stage: str) -> str:
    spent, wall_s = summary.cpu_s[name], summary.cpu_wall_s[name]
    total = sum(spent.values()) or 1.0
    rows = [
        [process, f"{seconds:.2f}", f"{seconds / total:.1%}", f"{seconds / wall_s:.2f}"]
        for process, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]
    title = f"{name}: CPU time by process at concurrency {cpu_stage} ({wall_s:.1f} s)"
    return _table(title, ["", "CPU s", "share", "cores"], rows)


def _idle(name: str, shares: dict[str, float]) -> str:
    each = ", ".join(f"{process} {share:.2%}" for process, share in shares.items())
    return f"{name}: idle CPU use, of one core: {sum(shares.values()):.2%} ({each})"


def _table(title: str, heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]
    lines = [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in cells)
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in (heading, *rows))
    ]
    return "\n".join([title, *(line.rstrip() for line in lines)])
