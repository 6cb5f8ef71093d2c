"""What steps on the device may not do: wait, take more and more memory, or harm requests that are not theirs."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

from engine.ipc.messages import Finish
from scheduler_proc.plan import Device, Handle, StepPlan
from scheduler_proc.worker.cuda import CudaDevice
from tests.support.device_matrix import (
    Run,
    TinyModel,
    answers_of,
    assert_identical,
    carry_out,
    configured,
    greedy_cases,
    sampling_cases,
    tiny_model,
)
from tests.support.device_spy import SAMPLED, Crowd, PromptFailure, Spy
from tests.support.scheduler import Harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]

DEVICE = "cuda"
MIB = 2**20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


class _Strict(Spy):
    """Once `strict` is set, a launch that waits for the device raises."""

    strict = False
    num_strict = 0

    def pass_on(self, device: Device, plan: StepPlan) -> Handle:
        if not self.strict:
            return device.launch(plan)
        self.num_strict += 1
        torch.cuda.set_sync_debug_mode("error")
        try:
            return device.launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _num_segments() -> int:
    """How often torch has asked the driver for device memory."""
    return torch.cuda.memory_stats()["segment.all.allocated"]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {**SAMPLED, "frequency_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("depth", [1, 2])
def test_steady_steps_neither_wait_nor_take_memory(
    model: TinyModel, tmp_path: Path, depth: int, sampling: dict[str, Any], graphs: bool
) -> None:
    run = Run(company=True, depth=depth, graphs=graphs, cache="cold")
    harness = Harness.of_model(tmp_path, configured(DEVICE, run, cuda_graph_max_bs=8), model.files)
    spy = _Strict(harness)
    for number, case in enumerate(greedy_cases(400, [3, 17, 40, 64, 65, 90, 5, 33], 120), start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, **sampling)
    # Longer than the pages that a row reserves ahead last, so that no kind of step is new.
    harness.turn(60)
    assert len(harness.slots.decode().rows) == 8
    num_segments = _num_segments()
    spy.strict = True
    harness.turn(40)
    spy.strict = False
    assert _num_segments() == num_segments
    assert spy.num_strict == 40
    harness.run()
    harness.device.close()
    assert not harness.errors
    assert all(len(tokens) == 120 for tokens in harness.tokens.values())


def test_nothing_is_compiled_after_the_start(model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes together in a step: what is compiled then holds up everybody."""
    run = Run(company=True, depth=2, graphs=True, cache="cold", chunk=512)
    options = {"max_running_requests": 64, "cuda_graph_max_bs": 64, "max_total_tokens": 1 << 16}
    harness = Harness.of_model(tmp_path, configured(DEVICE, run, **options), model.files)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **what: compiled.append(str(what["repr"])[:300])
    )
    rng = np.random.default_rng(1)
    for number in range(1, 301):
        length = int(rng.choice([1, 2, 3, 5, 9, 17, 40, 64, 100, 130, 300, 500]))
        harness.add(number, rng.integers(3, 400, length).tolist(), max_tokens=int(rng.integers(1, 60)), seed=number)
        harness.turn(int(rng.integers(0, 3)))
    harness.run()
    harness.device.close()
    assert not harness.errors
    assert compiled == []


@pytest.mark.parametrize("graphs", [True, False])
def test_memory_does_not_grow(model: TinyModel, tmp_path: Path, graphs: bool) -> None:
    run = Run(depth=2, graphs=graphs, cache="cold", chunk=64, small_pool=True)
    harness = Harness.of_model(tmp_path, configured(DEVICE, run), model.files)
    crowd = Crowd(harness)
    sizes = []
    for until_step in (2_000, 10_000):
        crowd.churn(until_step)
        # What tests before this one have left is not to count.
        gc.collect()
        torch.cuda.synchronize()
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    harness.device.close()
    assert not harness.errors and harness.planner.num_retractions > 0
    assert Finish.ABORT in harness.finish.values()
    (allocated, reserved), (allocated_later, reserved_later) = sizes
    assert abs(allocated_later - allocated) <= MIB
    assert abs(reserved_later - reserved) <= MIB


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_without_memory_fails_alone(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, graphs: bool
) -> None:
    run = Run(company=True, depth=depth, graphs=graphs, cache="cold")
    made = greedy_cases(400, [20, 30, 40, 50, 60, 70], 40)
    config = configured(DEVICE, run, deterministic=True, max_running_requests=4)
    expected = carry_out(tmp_path, config, model, made, run).answers
    harness = Harness.of_model(tmp_path, config, model.files)
    spy, failure = Spy(harness), PromptFailure(monkeypatch)
    for number, case in enumerate(made, start=1):
        harness.add(number, case.prompt, max_tokens=case.max_tokens, logprobs=20)
        if number == 2:
            # Two decode already as the third one's prompt fails with them; the last two wait for a slot.
            harness.turn(10)
            failure.due = True
    harness.turn(4)
    assert not failure.due
    harness.run()
    harness.device.close()
    assert {1, 2, 3} <= spy.victims
    assert set(harness.errors) == spy.victims
    others = [number for number in range(1, 7) if number not in spy.victims]
    assert {5, 6} <= set(others)
    assert_identical("others", [expected[number - 1] for number in others], answers_of(harness, others))


@contextmanager
def _no_memory_left() -> Generator[None]:
    """Take all memory that torch has from the driver, and let it have no more."""
    torch.cuda.synchronize()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    taken, size = [], 64 * MIB
    try:
        while size >= 512:
            try:
                taken.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
            except torch.OutOfMemoryError:
                size //= 2
        yield
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_after_memory_ran_out_the_engine_goes_on(tmp_path: Path) -> None:
    wide = tiny_model(tmp_path / "wide", intermediate_size=8192)
    run = Run(graphs=True, depth=1, cache="cold", chunk=2048)
    harness = Harness.of_model(tmp_path, configured(DEVICE, run, deterministic=True), wide.files)
    short, long = greedy_cases(400, [30, 1900], 10)
    harness.add(1, short.prompt, max_tokens=10)
    harness.run()
    with _no_memory_left():
        harness.add(2, long.prompt, max_tokens=10)
        harness.run()
    assert set(harness.errors) == {2}
    harness.add(3, short.prompt, max_tokens=10)
    harness.add(4, long.prompt, max_tokens=10)
    harness.run()
    harness.device.close()
    assert set(harness.errors) == {2}
    assert harness.tokens[3] == harness.tokens[1]
    assert len(harness.tokens[4]) == 10


@pytest.mark.parametrize("small_pool", [False, True])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_rows_that_have_ended_touch_nothing(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, graphs: bool, small_pool: bool
) -> None:
    """Freed pages are overwritten at once, beside the steps in flight: nobody may read them, nor write to them."""
    made = sampling_cases(400, [1, 5, 16, 17, 40, 64, 65, 90] * 4, 24)
    quiet = Run(page_size=16)
    expected = carry_out(tmp_path, configured(DEVICE, quiet, deterministic=True), model, made, quiet).answers
    assert len({len(answer.tokens) for answer in expected}) > 3
    side, freed = torch.cuda.Stream(), []

    def poison(self: CudaDevice, pages: np.ndarray) -> None:
        with torch.cuda.stream(side):
            self.runner.kv_pool.fill(torch.tensor(pages, dtype=torch.int64, device=DEVICE), float("nan"))
        side.synchronize()
        freed.append(len(pages))

    monkeypatch.setattr(CudaDevice, "pages_freed", poison)
    run = Run(company=True, chunk=64, cache="cold", depth=depth, graphs=graphs, small_pool=small_pool)
    outcome = carry_out(tmp_path, configured(DEVICE, run, deterministic=True), model, made, run)
    assert sum(freed) > 0
    assert_identical(str(run), expected, outcome.answers)
