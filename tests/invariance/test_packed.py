"""The matrix on packed weights: integer kernels leave no bit to chance, so nothing may differ at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import ModelOptions
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from tests.support.matrix import TOKENS, Case, Reference, cases, config, references, run_together
from tests.support.packed import needs_kernels
from tests.support.scheduler import Harness

pytestmark = needs_kernels

KINDS = {
    "float16": ModelOptions(quantization="int8"),
    "int8": ModelOptions(quantization="int8", kv_cache_dtype="int8"),
}


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> ModelOptions:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def alone(
    tiny: ModelFiles, made: list[Case], kind: ModelOptions, tmp_path_factory: pytest.TempPathFactory
) -> list[Reference]:
    return references(tmp_path_factory.mktemp("alone"), tiny, made, options=kind)


def _assert_equal(expected: list[Reference], got: list[list[int]]) -> None:
    assert got == [reference.tokens for reference in expected]


@pytest.mark.parametrize(
    ("device", "depth", "page_size", "chunk", "threads"),
    [
        ("cpu", 0, 16, 1, 1),
        ("cpu", 0, 1, 64, 2),
        ("cpu", 1, 7, 7, 3),
        ("cpu", 2, 16, 33, 2),
        ("delayed", 0, 7, 4096, 1),
        ("delayed", 1, 1, 7, 2),
        ("delayed", 2, 16, 64, 2),
    ],
)
def test_matrix(
    tiny: ModelFiles,
    made: list[Case],
    kind: ModelOptions,
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
    page_size: int,
    chunk: int,
    threads: int,
) -> None:
    options = config(
        model=kind,
        threads=threads,
        device=device,
        overlap_depth=depth,
        page_size=page_size,
        chunked_prefill_size=max(chunk, 16),
        max_prefill_tokens=chunk,
    )
    harness = Harness.of_model(tmp_path, options, tiny)
    _assert_equal(alone, run_together(harness, made, stagger=1))


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("delayed", 2)])
def test_cold_warm_off_and_retracted(
    tiny: ModelFiles,
    made: list[Case],
    kind: ModelOptions,
    alone: list[Reference],
    tmp_path: Path,
    device: str,
    depth: int,
) -> None:
    base = {"device": device, "overlap_depth": depth, "model": kind, "threads": 2}
    off = Harness.of_model(tmp_path, config(disable_radix_cache=True, page_size=7, **base), tiny)
    _assert_equal(alone, run_together(off, made))
    harness = Harness.of_model(tmp_path, config(page_size=1, **base), tiny)
    for first in (1, 101):
        for number, case in enumerate(made, start=first):
            harness.add(number, case.prompt, max_tokens=case.max_tokens, **case.sampling)
        harness.run()
        _assert_equal(alone, [harness.tokens[number] for number in range(first, first + len(made))])
    harness.device.close()
    assert sum(harness.cached[number] for number in range(101, 101 + len(made))) > 0
    small = config(max_total_tokens=160, chunked_prefill_size=32, schedule_conservativeness=0.01, **base)
    harness = Harness.of_model(tmp_path, small, tiny)
    _assert_equal(alone, run_together(harness, made))
    assert harness.planner.num_retractions > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [ModelOptions(), ModelOptions(kv_cache_dtype="int8")], ids=["float16", "int8"])
def test_the_default_model(tmp_path: Path, options: ModelOptions) -> None:
    model = resolve(None)
    made = cases(model.config.vocab_size, [3, 17, 64, 130, 400], TOKENS, seed=1)
    alone = references(tmp_path, model, made, threads=2, options=options)
    for device, depth, page_size, chunk in [
        ("cpu", 0, 16, 7),
        ("cpu", 1, 1, 64),
        ("delayed", 1, 16, 256),
        ("delayed", 2, 7, 33),
    ]:
        placed = config(
            model=options,
            threads=2,
            device=device,
            overlap_depth=depth,
            page_size=page_size,
            chunked_prefill_size=chunk,
            max_total_tokens=2048,
        )
        harness = Harness.of_model(tmp_path, placed, model)
        _assert_equal(alone, run_together(harness, made))
