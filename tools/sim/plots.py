"""Line charts as SVG text."""

from __future__ import annotations

import html
from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import Literal, NamedTuple

from tools.sim.summary import Summary

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Told apart with any colour vision."""
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 130, 40, 55
Point = tuple[float, float]
Scale = Literal["zero", "near", "log"]
"""Of the y axis: from zero, from just below the least value (where differences are small), or logarithmic."""


class Axis(NamedTuple):
    """A scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = log10(low), log10(high), log10(max(value, self.low))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            return [10.0**power for power in range(round(log10(self.low)), round(log10(self.high)) + 1)]
        step = 10 ** floor(log10((self.high - self.low) / 4))
        step *= next(factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
        count = floor((self.high - self.low) / step + 1e-9)
        return [self.low + index * step for index in range(count + 1)]


def line_chart(
    title: str,
    x_name: str,
    y_name: str,
    series: dict[str, Sequence[Point]],
    *,
    scale: Scale = "zero",
) -> str:
    """A line per series; every series has at least one (x, y) point."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    least, most = min(xs), max(xs)
    x_axis = Axis(least, most if most > least else least + 1, LEFT, WIDTH - RIGHT)
    y_axis = _y_axis(ys, scale)
    marks = _frame(title, x_name, y_name, y_axis)
    for tick in sorted(set(xs)):
        marks.append(_text(x_axis.at(tick), HEIGHT - BOTTOM + 18, f"{tick:g}", "middle"))
    for index, (name, points) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        placed = [(x_axis.at(x), y_axis.at(y)) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        marks += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
        marks += _legend(index, name, colour)
    return _document(marks)


def write_plots(folder: Path, name: str, rows: Sequence[Summary]) -> list[Path]:
    """First-token times, goodput and hit rate against rate, a line per policy."""
    wanted: tuple[tuple[str, str, str, str, Scale], ...] = (
        ("ttft", "time to first token, p99", "ms", "ttft_p99", "log"),
        ("goodput", "requests within both objectives", "requests/s", "goodput", "zero"),
        ("hits", "prompt tokens found in the cache", "share", "hit_rate", "near"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for short, title, unit, field, scale in wanted:
        series: dict[str, list[Point]] = {}
        for row in rows:
            series.setdefault(row.policy, []).append((row.rate, float(getattr(row, field))))
        lines: dict[str, Sequence[Point]] = {policy: sorted(points) for policy, points in series.items()}
        path = folder / f"{name}-{short}.svg"
        path.write_text(line_chart(f"{name}: {title}", "requests/s offered", unit, lines, scale=scale))
        paths.append(path)
    return paths


def _y_axis(values: Sequence[float], scale: Scale) -> Axis:
    start, end = HEIGHT - BOTTOM, TOP
    least, most = min(values), max(values)
    if scale == "log":
        low, high = floor(log10(max(least, 1e-3))), ceil(log10(max(most, 1e-3)))
        return Axis(10.0**low, 10.0 ** max(high, low + 1), start, end, log=True)
    if scale == "near" and most > least:
        step = 10.0 ** floor(log10(most - least))
        return Axis(floor(least / step) * step, ceil(most / step) * step, start, end)
    return Axis(0.0, most * 1.05 if most > 0 else 1.0, start, end)


def _frame(title: str, x_name: str, y_name: str, y_axis: Axis) -> list[str]:
    marks = [
        _text(LEFT, 22, title, "start", size=14),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, x_name, "middle"),
        _text(8, TOP - 8, y_name, "start"),
    ]
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        marks.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#ddd"/>')
        marks.append(_text(LEFT - 6, y + 4, f"{tick:.6g}", "end"))
    return marks


def _legend(index: int, name: str, colour: str) -> list[str]:
    x, y = WIDTH - RIGHT + 14, TOP + 14 + index * 20
    return [f'<rect x="{x}" y="{y - 9}" width="12" height="10" fill="{colour}"/>', _text(x + 18, y, name, "start")]


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'


def _document(marks: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *marks, "</svg>", ""])
