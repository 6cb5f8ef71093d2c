"""Charts are well-formed SVG with every series in them."""

from __future__ import annotations

from xml.etree import ElementTree

from tools.sim.plots import Scale, line_chart

SVG = "{http://www.w3.org/2000/svg}"


def test_a_line_per_series() -> None:
    text = line_chart("a < b", "rate", "ms", {"fcfs": [(1, 10), (2, 2000)], "lpm": [(1, 12), (2, 900)]}, scale="log")
    root = ElementTree.fromstring(text)
    assert len(root.findall(f"{SVG}polyline")) == 2
    assert {"a < b", "fcfs", "lpm"} <= {mark.text for mark in root.iter(f"{SVG}text")}


def test_one_point_and_zeros_are_drawn_too() -> None:
    scales: tuple[Scale, ...] = ("zero", "near", "log")
    for scale in scales:
        ElementTree.fromstring(line_chart("t", "x", "y", {"one": [(5, 0)]}, scale=scale))


def test_small_differences_fill_the_chart() -> None:
    text = line_chart("t", "x", "y", {"one": [(1, 0.801), (2, 0.829)]}, scale="near")
    line = ElementTree.fromstring(text).find(f"{SVG}polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in line.attrib["points"].split()]
    assert heights[0] - heights[1] > 200
