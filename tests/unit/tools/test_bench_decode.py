"""The decode benchmark runs, knows what bounds a step, and reads traces right."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools import bench_decode, trace_step
from tools.decode_bench.measure import floor_ms
from tools.decode_bench.shapes import SHAPES, shaped_model
from tools.decode_bench.timeline import kind_of, timeline
from tools.decode_bench.trace import Gaps, gaps_of, parse_trace

SVG = "{http://www.w3.org/2000/svg}"


def _event(category: str, name: str, begin: float, length: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length, "args": args}


def _steps(num_steps: int, *, num_kernels: int = 2) -> list[dict[str, Any]]:
    """Steps 30 us apart, launched 70 us before they run: kernels of 30 us, 5 us apart, and a copy at the end."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "args": {"name": "python"}}]
    for step in range(num_steps):
        at = 1000.0 + (35 * num_kernels + 30) * step
        events += [
            _event("user_annotation", "launch", at - 70, 20),
            _event("gpu_user_annotation", "launch", at, 65),
            _event("cuda_runtime", "cudaGraphLaunch", at - 60, 5, 10 + step),
            _event("cuda_runtime", "cudaMemcpyAsync", at - 54, 2, 500 + step),
            _event("user_annotation", "collect", at - 45, 40),
            _event("gpu_memcpy", "Memcpy DtoH", at + 35 * num_kernels, 1, 500 + step),
        ]
        names = ("attend", "strip_kernel", "rms_rows", "take_largest")
        events += [
            _event("kernel", names[index % 4], at + 35 * index, 30, 10 + step) for index in reversed(range(num_kernels))
        ]
    return events


def test_kernels_belong_to_the_launch_that_started_them() -> None:
    # A kernel that was started before the profiler saw anything, and one of the step before, still running.
    early = [_event("kernel", "unknown", 900, 20, 3), _event("kernel", "unknown", 910, 20, 4)]
    early.append(_event("cuda_driver", "cuLaunchKernelEx", 800, 3, 4))
    trace = parse_trace([*early, *_steps(3)])
    assert [[kernel.name for kernel in step.kernels] for step in trace.steps] == [["attend", "strip_kernel"]] * 3
    assert [[copy.name for copy in step.copies] for step in trace.steps] == [["Memcpy DtoH"]] * 3
    assert [span.name for span in trace.host] == ["launch", "collect"] * 3


def test_gaps() -> None:
    gaps = gaps_of(parse_trace(_steps(5)))
    assert gaps == Gaps(
        num_steps=5,
        period_us=100,
        busy_share=pytest.approx(0.6),
        between_us=pytest.approx(35),
        between_most_us=pytest.approx(35),
        within_us=pytest.approx(5),
        kernels_per_step=2,
        launch_us=pytest.approx(20),
        top=[("attend", 1, pytest.approx(30)), ("strip_kernel", 1, pytest.approx(30))],
    )


def test_overlapping_kernels_count_once() -> None:
    events = _steps(3)
    # Programmatic dependent launch: the next step's first kernel begins before this one's last has ended.
    events += [_event("kernel", "long", 1040 + 100 * step, 70, 10 + step) for step in range(3)]
    gaps = gaps_of(parse_trace(events))
    assert gaps is not None
    assert (gaps.between_us, gaps.between_most_us) == (0, 0)
    assert gaps.busy_share == pytest.approx(0.95)
    assert gaps.within_us == pytest.approx(5)


def test_a_trace_without_kernels_says_nothing(tmp_path: Path) -> None:
    host_only = [event for event in _steps(3) if event.get("cat") == "user_annotation"]
    assert gaps_of(parse_trace(host_only)) is None
    with pytest.raises(ValueError, match="no two steps"):
        timeline(parse_trace(host_only), "nothing")
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": host_only}))
    with pytest.raises(SystemExit, match="no two launches"):
        trace_step.main([str(path)])


def test_the_picture_is_small_and_shows_what_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "trace.json.gz", tmp_path / "steps.svg"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": _steps(6, num_kernels=400)}).encode()))
    trace_step.main([str(path), "--timeline", str(picture), "--title", "a < b"])
    assert "400 kernels each" in capsys.readouterr().out
    assert picture.stat().st_size < 100_000
    root = ElementTree.fromstring(picture.read_text())
    assert root.attrib["viewBox"].split()[2] == "1200"
    texts = {mark.text for mark in root.iter(f"{SVG}text")}
    assert {"a < b", "attention", "matrix product", "norm, rotary, gate", "sampling", "copy", "launch"} <= texts
    right = [float(bar.attrib["x"]) for bar in root.iter(f"{SVG}rect") if "x" in bar.attrib]
    assert max(right) <= 1200


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void flash::flash_fwd_splitkv_attention", "attention"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "matrix product"),
        ("rope_store_heads", "norm, rotary, gate"),
        ("take_largest", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4>", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name)[0] == kind


def test_the_floor_of_known_models(tmp_path: Path) -> None:
    for shape, batch, expected in (("8b", 1, 3.58), ("8b", 128, 7.85), ("0.6b", 1, 0.31), ("0.6b", 256, 7.82)):
        model = shaped_model(shape, tmp_path).config
        assert floor_ms(model, batch, 1024, 128, 4235) == pytest.approx(expected, abs=0.02)


def test_every_shape_is_a_config_the_engine_reads(tmp_path: Path) -> None:
    for shape in SHAPES:
        assert shaped_model(shape, tmp_path).config.eos_ids


@pytest.mark.parametrize("depth", [0, 2])
def test_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str], depth: int) -> None:
    figures = tmp_path / "figures.json"
    arguments = (
        "--shape tiny --batch 1 3 --context 40 --steps 6 --prefill 20 50 --device cpu --dtype float32 --cpu-threads 1"
    )
    bench_decode.main([*arguments.split(), "--overlap-depth", str(depth), "--json", str(figures)])
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in printed] == ["start:", "batch", "1", "3", "prefill", "prefill"]
    found = json.loads(figures.read_text())
    assert [row["batch"] for row in found["decode"]] == [1, 3]
    assert all(row["cached_tokens"] >= 32 and row["steady_ms"] > 0 for row in found["decode"])
    assert [row["num_tokens"] for row in found["prefill"]] == [20, 50]
    assert found["overlap_depth"] == depth and found["start_s"]["build"] > 0


def test_it_traces_on_a_cpu_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json.gz"
    arguments = "--shape tiny --batch 2 --context 10 --steps 3 --device cpu --dtype float32 --cpu-threads 1 --gaps"
    bench_decode.main([*arguments.split(), "--trace", str(path)])
    assert "no kernels" in capsys.readouterr().out
    host = parse_trace(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]).host
    assert [span.name for span in host] == ["launch", "collect"] * 20
