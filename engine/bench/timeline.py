"""A picture of a load over time, as SVG text: output tokens per second, running requests, times to the first token."""

from __future__ import annotations

import html
from collections.abc import Sequence
from math import floor, log10
from typing import NamedTuple

import numpy as np

from engine.bench.job import Record

WIDTH = 1200
LEFT, RIGHT, TOP, BOTTOM = 90, 20, 60, 50
PANEL, PANEL_GAP = 170, 46
BINS = 120
"""Stretches of time that tokens are counted in."""
_RATE, _RUNNING, _OK, _FAILED = "#0072b2", "#009e73", "#d55e00", "#000"

Series = tuple[np.ndarray, np.ndarray]


class _Panel(NamedTuple):
    """A chart: x is seconds from 0, y from 0."""

    title: str
    top: float
    x_most: float
    y_most: float

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.x_most * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.top + PANEL - value / self.y_most * PANEL


def timeline(records: Sequence[Record], title: str) -> str:
    """Time runs from the first request's sending; a dot is a request, at its sending. Needs at least one record."""
    begin = min(record.sent for record in records)
    seconds = max(max(record.end for record in records) - begin, 1e-3)
    rate, running = token_rate(records, begin, seconds), running_requests(records, begin)
    good = [record for record in records if not record.error]
    dots = _series([(record.sent - begin, record.ttft_s * 1e3) for record in good])
    failed = _series([(record.sent - begin, 0.0) for record in records if record.error])
    names = ("output tok/s", "running requests", "time to first token, ms (failed requests: black, at 0)")
    panels = [
        _Panel(name, TOP + index * (PANEL + PANEL_GAP), seconds, _most(values))
        for index, (name, values) in enumerate(zip(names, (rate[1], running[1], dots[1]), strict=True))
    ]
    marks = [_text(LEFT, 28, title, size=18)]
    for panel in panels:
        marks += _frame(panel)
    marks.append(_steps(panels[0], rate, _RATE))
    marks.append(_steps(panels[1], running, _RUNNING))
    marks += [_dots(panels[2], dots, _OK), _dots(panels[2], failed, _FAILED)]
    bottom = panels[-1].top + PANEL
    marks += [_text(panels[-1].x(tick), bottom + 20, f"{tick:g}", anchor="middle") for tick in _ticks(seconds, 10)]
    marks.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 42, "seconds", anchor="middle"))
    size = f'viewBox="0 0 {WIDTH} {bottom + BOTTOM:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *marks, "</svg>", ""])


def token_rate(records: Sequence[Record], begin: float, seconds: float) -> Series:
    """(begins of BINS stretches of `seconds`, tokens per second in each): a request's tokens evenly on its arrivals."""
    moments = [np.asarray(record.arrivals) for record in records if not record.error and record.arrivals]
    weights = [
        np.full(len(record.arrivals), record.output_tokens / len(record.arrivals))
        for record in records
        if not record.error and record.arrivals
    ]
    edges = np.linspace(0.0, seconds, BINS + 1)
    if not moments:
        return edges[:-1], np.zeros(BINS)
    counts, _ = np.histogram(np.concatenate(moments) - begin, edges, weights=np.concatenate(weights))
    return edges[:-1], counts * BINS / seconds


def running_requests(records: Sequence[Record], begin: float) -> Series:
    """(seconds, requests between sending and end from then on), at every change."""
    changes = sorted(change for record in records for change in ((record.sent - begin, 1), (record.end - begin, -1)))
    times, steps = zip(*changes, strict=True)
    return np.asarray(times), np.cumsum(steps)


def _series(points: Sequence[tuple[float, float]]) -> Series:
    found = np.asarray(points, dtype=float).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def _most(values: np.ndarray) -> float:
    most = float(values.max(initial=0.0))
    return most * 1.08 if most > 0 else 1.0


def _frame(panel: _Panel) -> list[str]:
    marks = [_text(LEFT, panel.top - 8, panel.title, size=14)]
    for tick in _ticks(panel.y_most, 5):
        y = panel.y(tick)
        marks.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        marks.append(_text(LEFT - 8, y + 4, f"{tick:,g}" if tick < 1e5 else f"{tick:,.0f}", anchor="end"))
    return marks


def _steps(panel: _Panel, series: Series, colour: str) -> str:
    """A line that holds each value until the next; of changes that share a pixel only the last is drawn."""
    x = [f"{panel.x(float(seconds)):.0f}" for seconds in series[0]]
    drawn = [index for index in range(len(x)) if index + 1 == len(x) or x[index + 1] != x[index]]
    parts = [f"H{x[index]}V{panel.y(float(series[1][index])):.1f}" for index in drawn]
    path = f"M{LEFT} {panel.y(0):.1f}" + "".join(parts) + f"H{WIDTH - RIGHT}"
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _dots(panel: _Panel, series: Series, colour: str) -> str:
    """All dots of a colour as one path: lines of no length with round ends."""
    points = zip(series[0], series[1], strict=True)
    path = "".join(f"M{panel.x(float(x)):.1f} {panel.y(float(y)):.1f}h0" for x, y in points)
    return f'<path d="{path}" stroke="{colour}" stroke-width="4" stroke-linecap="round" stroke-opacity="0.6"/>'


def _ticks(most: float, count: int) -> list[float]:
    """Multiples of a round step, at most `count` and the 0."""
    power = 10.0 ** floor(log10(most / count))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * count >= most)
    return [round(index * step, 9) for index in range(int(most / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{html.escape(text)}</text>'
