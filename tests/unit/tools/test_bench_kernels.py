"""The kernel benchmark's bookkeeping; what it measures needs a device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.kernel_bench import case as case_module
from tools.kernel_bench.case import Case, run_case
from tools.kernel_bench.measure import Call, Ceilings
from tools.kernel_bench.report import header, line, write_json
from tools.kernel_bench.shapes import SHAPES

CEILINGS = Ceilings("a device", bytes_per_s=1e12, flops_per_s=1e14)


@pytest.fixture(autouse=True)
def times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes as long as it returns."""

    def first(calls: list[Call]) -> float:
        seconds = calls[0]()
        assert isinstance(seconds, float)
        return seconds

    monkeypatch.setattr(case_module, "time_calls", first)


def _fail() -> float:
    raise ValueError("pages of 3 tokens\nand more")


def test_sorted_with_share_of_the_bound() -> None:
    case = Case("op", "8B", "1 x 2", 1_000_000, 10, {"a": [lambda: 4e-6], "bad": [_fail], "b": [lambda: 2e-6]})
    fast, slow, failed = run_case(case, CEILINGS)
    assert (fast.way, slow.way, failed.way) == ("b", "a", "bad")
    assert fast.bound_s == pytest.approx(1e-6)
    assert (fast.share, slow.share, failed.share) == (pytest.approx(0.5), pytest.approx(0.25), 0.0)
    assert failed.failure == "ValueError: pages of 3 tokens"
    assert line(fast).split()[-5:] == ["2.0", "1.00", "0.00", "1.0", "0.50"]
    assert line(failed).endswith("pages of 3 tokens")
    assert "1,000 GB/s" in header(CEILINGS)


def test_arithmetic_bounds_where_it_takes_longer() -> None:
    (result,) = run_case(Case("op", "8B", "", 10, 10**9, {"a": [lambda: 1e-5]}), CEILINGS)
    assert result.bound_s == pytest.approx(1e-5)


def test_json(tmp_path: Path) -> None:
    results = run_case(Case("op", "8B", "x", 1, 1, {"a": [lambda: 1.0], "bad": [_fail]}), CEILINGS)
    write_json(tmp_path / "out.json", CEILINGS, results)
    found = json.loads((tmp_path / "out.json").read_text())
    assert [row["seconds"] for row in found["results"]] == [1.0, None]
    assert found["ceilings"]["name"] == "a device"


def test_shapes() -> None:
    linears = SHAPES["8B"].linears()
    assert linears["qkv"] == (6144, 4096)
    assert linears["gate_up"] == (28672, 4096)
    weights = 32 * sum(n * k for name, (n, k) in linears.items() if name != "head") + 2 * 128256 * 4096
    assert weights == pytest.approx(8.03e9, rel=0.01)
