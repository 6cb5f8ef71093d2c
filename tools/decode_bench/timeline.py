"""A picture of two decode steps, and of the moment between them: SVG text for docs, readable at 1,200 px width."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tools.decode_bench.trace import COLLECT, LAUNCH, Span, Step, Trace

WIDTH = 1200
LEFT, RIGHT = 90, 16
LANE, LANE_GAP = 30, 8
PANEL_GAP = 64
TOP = 92
KINDS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("attention", "#0072b2", ("attend", "attention", "merge_parts", "mha", "xqa", "decode", "prefill", "pages")),
    (
        "matrix product",
        "#e69f00",
        ("gemm", "gemv", "strip_kernel", "vector_kernel", "tile_kernel", "fixed_kernel", "nvjet", "cutlass", "splitk"),
    ),
    ("norm, rotary, gate", "#009e73", ("rms", "norm", "rope", "rotate", "gate_rows", "silu")),
    (
        "sampling",
        "#cc79a7",
        ("summarise", "largest", "choose_rows", "candidates", "bound_rows", "advance", "penalise", "score", "argmax"),
    ),
)
"""(what, colour, parts of kernel names): the first that fits."""
OTHER = ("other", "#888888")
HOST_COLOURS = {LAUNCH: "#d55e00", COLLECT: "#56b4e9"}
COPY_COLOUR = "#444444"


@dataclass(frozen=True)
class _Panel:
    """A stretch of time across the whole width."""

    begin: float
    end: float
    top: float

    def x(self, time: float) -> float:
        inside = min(max(time, self.begin), self.end)
        return LEFT + (inside - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def lane(self, index: int) -> float:
        return self.top + index * (LANE + LANE_GAP)


def kind_of(name: str) -> tuple[str, str]:
    """(kind, colour) of a kernel."""
    lower = name.lower()
    return next(((kind, colour) for kind, colour, parts in KINDS if any(part in lower for part in parts)), OTHER)


def timeline(trace: Trace, title: str) -> str:
    """Two steps from the middle of the trace. Raises ValueError if it holds no two."""
    if len(trace.steps) < 2:
        raise ValueError("the trace holds no two steps with kernels")
    at = (len(trace.steps) - 2) // 2
    one, two = trace.steps[at : at + 2]
    margin = 0.02 * (two.end - one.begin)
    around = max(0.03 * (one.end - one.begin), 20.0)
    lanes = 3
    second_top = TOP + lanes * (LANE + LANE_GAP) + PANEL_GAP
    whole = _Panel(one.begin - margin, two.end + margin, TOP)
    edge = _Panel(min(one.end, two.begin) - around, max(one.end, two.begin) + around, second_top)
    marks = [_text(LEFT, 26, title, size=18), *_legend(one, two)]
    marks += _panel(whole, trace, f"two steps, {two.end - one.begin:.0f} us", labels=False)
    marks += _borders(whole, one.begin, two.begin)
    gap = two.begin - one.end
    what = f"{gap:.1f} us idle" if gap > 0 else "no idle time"
    marks += _panel(edge, trace, f"between them: {what} from the last kernel to the first", labels=True)
    marks += _borders(edge, one.end, two.begin)
    height = second_top + lanes * (LANE + LANE_GAP) + 30
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *marks, "</svg>", ""])


def _panel(panel: _Panel, trace: Trace, title: str, *, labels: bool) -> list[str]:
    marks = [_text(LEFT, panel.top - 10, title, size=14)]
    for index, name in enumerate(("kernels", "copies", "host")):
        y = panel.lane(index)
        marks.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" fill="#f4f4f4"/>')
        marks.append(_text(LEFT - 8, y + 20, name, anchor="end", size=14))
    kernels = _inside(panel, (kernel for step in trace.steps for kernel in step.kernels))
    copies = _inside(panel, (copy for step in trace.steps for copy in step.copies))
    for colour in dict.fromkeys(kind_of(kernel.name)[1] for kernel in kernels):
        own = [kernel for kernel in kernels if kind_of(kernel.name)[1] == colour]
        marks.append(_bars(panel, 0, own, colour))
    marks.append(_bars(panel, 1, copies, COPY_COLOUR))
    host = _inside(panel, trace.host)
    for name, colour in HOST_COLOURS.items():
        marks.append(_bars(panel, 2, [span for span in host if span.name == name], colour))
    if labels:
        marks += _labels(panel, 0, kernels)
    marks += _labels(panel, 2, host)
    return marks + _ruler(panel)


def _inside(panel: _Panel, spans: Iterable[Span]) -> list[Span]:
    return [span for span in spans if span.end > panel.begin and span.begin < panel.end]


def _bars(panel: _Panel, lane: int, spans: Sequence[Span], colour: str) -> str:
    """One path for all bars of a colour: hundreds of them in few bytes. A bar is at least visible."""
    y, path = panel.lane(lane), []
    for span in spans:
        x = panel.x(span.begin)
        width = max(panel.x(span.end) - x, 0.4)
        path.append(f"M{x:.1f} {y:g}h{width:.1f}v{LANE}h-{width:.1f}z")
    return f'<path fill="{colour}" d="{"".join(path)}"/>'


def _labels(panel: _Panel, lane: int, spans: Sequence[Span]) -> list[str]:
    """Names in the bars that have room for some of it."""
    marks = []
    for span in spans:
        x, end = panel.x(span.begin), panel.x(span.end)
        room = int((end - x - 6) / 7)
        if room >= 4:
            marks.append(_text(x + 3, panel.lane(lane) + 20, span.name[:room], size=12, fill="#fff"))
    return marks


def _borders(panel: _Panel, *times: float) -> list[str]:
    """Where steps begin or end."""
    bottom = panel.lane(3) - LANE_GAP
    return [
        f'<path d="M{panel.x(time):.1f} {panel.top - 6:g}V{bottom:g}" stroke="#000" stroke-dasharray="4 3"/>'
        for time in times
    ]


def _ruler(panel: _Panel) -> list[str]:
    """A bar of a round length, for scale."""
    span = panel.end - panel.begin
    length = max(step * 10**power for power in range(-1, 6) for step in (1, 2, 5) if step * 10**power <= span / 6)
    x, y = LEFT, panel.lane(3) + 6
    end = x + length / span * (WIDTH - LEFT - RIGHT)
    return [
        f'<path d="M{x} {y - 4}v8M{x} {y}H{end:.1f}M{end:.1f} {y - 4}v8" stroke="#000" fill="none"/>',
        _text(end + 8, y + 5, f"{length:g} us", size=13),
    ]


def _legend(*steps: Step) -> list[str]:
    found = dict.fromkeys(kind_of(kernel.name) for step in steps for kernel in step.kernels)
    entries = [*found, ("copy", COPY_COLOUR), *HOST_COLOURS.items()]
    marks, x = [], float(LEFT)
    for name, colour in entries:
        marks.append(f'<rect x="{x:.0f}" y="42" width="14" height="14" fill="{colour}"/>')
        marks.append(_text(x + 20, 54, name, size=14))
        x += 44 + 8 * len(name)
    return marks


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = "#000") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">'
        f"{html.escape(text)}</text>"
    )
