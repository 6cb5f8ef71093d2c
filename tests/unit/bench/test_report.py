"""Figures of known requests, and the picture of them."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

from engine.bench.job import BenchError, Outcome, Record
from engine.bench.report import describe, parse_goals, peak_concurrent, row, summarise, times
from engine.bench.timeline import running_requests, timeline, token_rate

SVG = "{http://www.w3.org/2000/svg}"
RECORDS = [
    Record(0, 10.0, 11.0, [10.2, 10.4, 10.9], 4, 100, 5, 60),
    Record(1, 10.5, 12.0, [11.5], 1, 50, 1, 0),
    Record(2, 11.0, 11.6, [11.2], 1, error="broken stream", message="reset"),
    Record(3, 12.0, 14.0, [], 0, 10, 2, 0),
]


def test_percentiles_are_numpys() -> None:
    seconds = np.random.default_rng(0).exponential(0.1, 1001)
    found = times(list(seconds))
    assert found is not None
    assert (found.mean, found.max) == pytest.approx((seconds.mean() * 1e3, seconds.max() * 1e3))
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(found, name) == pytest.approx(np.percentile(seconds, share) * 1e3)
    assert times([]) is None


def test_a_summary_of_known_requests() -> None:
    goals = parse_goals(["ttft:300", "tpot:201"])
    summary = summarise(Outcome(RECORDS, 0.9), [5, 1, 9, 3], goals)
    assert summary.duration_s == pytest.approx(4)
    assert (summary.num_ok, summary.num_failed, summary.errors) == (3, 1, {"broken stream": 1})
    assert (summary.input_tokens, summary.output_tokens, summary.cached_tokens) == (160, 8, 60)
    assert summary.output_tokens_per_s == pytest.approx(2) and summary.total_tokens_per_s == pytest.approx(42)
    assert summary.peak_concurrent == 2 and summary.num_other_length == 1
    # An answer without text has its first token at its end.
    assert summary.ttft_ms is not None and summary.ttft_ms.mean == pytest.approx((200 + 1000 + 2000) / 3)
    assert summary.tpot_ms is not None and summary.tpot_ms.mean == pytest.approx((800 / 4 + 0) / 2)
    assert summary.itl_ms is not None and summary.itl_ms.max == pytest.approx(500)
    assert summary.goodput is not None and summary.goodput.share == pytest.approx(0.25)
    text = describe(summary)
    assert "3 ok, 1 failed" in text and "1 x broken stream" in text and "--processes" in text
    assert "ttft:300 tpot:201" in text


def test_nothing_but_failures() -> None:
    summary = summarise(Outcome(RECORDS[2:3], 0.0), [0, 0, 9], {})
    assert summary.ttft_ms is None and summary.goodput is None
    assert "0 ok, 1 failed" in describe(summary)
    ElementTree.fromstring(timeline(RECORDS[2:3], "nothing"))
    with pytest.raises(BenchError):
        summarise(Outcome([], 0.0), [], {})


def test_one_that_ends_makes_room() -> None:
    assert peak_concurrent([Record(0, 0.0, 1.0), Record(1, 1.0, 2.0), Record(2, 1.5, 3.0)]) == 2


def test_rows() -> None:
    assert row(RECORDS[0], 10.0)["itl_ms"] == pytest.approx([200, 500])
    assert row(RECORDS[2], 10.0)["error"] == "broken stream"
    assert "error" not in row(RECORDS[3], 10.0)


def test_the_picture_holds_every_request() -> None:
    begins, rate = token_rate(RECORDS, 10.0, 4.0)
    assert rate.sum() * (begins[1] - begins[0]) == pytest.approx(6)
    moments, running = running_requests(RECORDS, 10.0)
    assert moments[0] == 0 and running[-1] == 0 and running.max() == 2
    root = ElementTree.fromstring(timeline(RECORDS, "a < b"))
    assert "a < b" in {mark.text for mark in root.iter(f"{SVG}text")}
    dots = [path for path in root.iter(f"{SVG}path") if path.attrib.get("stroke-linecap") == "round"]
    assert [path.attrib["d"].count("M") for path in dots] == [3, 1]


def test_the_picture_of_a_large_load_is_small() -> None:
    rng = np.random.default_rng(1)
    sent = np.sort(rng.uniform(0, 100, 3000))
    records = [Record(index, at, at + 5, list(at + np.linspace(1, 5, 60)), 60, 9, 60) for index, at in enumerate(sent)]
    assert len(timeline(records, "large")) < 150_000
