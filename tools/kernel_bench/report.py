"""Results as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tools.kernel_bench.case import Result
from tools.kernel_bench.measure import Ceilings


def header(ceilings: Ceilings) -> str:
    """The device, and the heads of the columns."""
    return (
        f"{ceilings.name}: copy {ceilings.bytes_per_s / 1e9:,.0f} GB/s, bf16 product "
        f"{ceilings.flops_per_s / 1e12:,.0f} TFLOP/s\n"
        f"{'op':22} {'model':5} {'shape':52} {'way':24} {'us':>8} {'MB':>8} {'GFLOP':>8} "
        f"{'bound us':>8} {'share':>6}"
    )


def line(result: Result) -> str:
    """One row of the table; a failed way says why."""
    start = f"{result.op:22} {result.model:5} {result.what:52} {result.way:24}"
    if result.seconds is None:
        return f"{start} {result.failure}"
    costs = f"{result.size_bytes / 1e6:8.2f} {result.flops / 1e9:8.2f}"
    return f"{start} {result.seconds * 1e6:8.1f} {costs} {result.bound_s * 1e6:8.1f} {result.share:6.2f}"


def write_json(file: Path, ceilings: Ceilings, results: Iterable[Result]) -> None:
    """Everything, in seconds, bytes and operations."""
    rows = [asdict(result) for result in results]
    file.write_text(json.dumps({"ceilings": asdict(ceilings), "results": rows}, indent=1))
