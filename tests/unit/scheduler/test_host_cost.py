"""Host cost by counts, not time: a steady step costs the same calls at batch 8 and 64, and one message."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ipc.messages import Stamps, TokenizedRequest, pack_i32, unpack_i32
from engine.model_files.resolve import resolve
from engine.sampling import SamplingParams
from scheduler_proc.build import build
from scheduler_proc.cache.kv_cache import RESERVED_IF_ROOMY
from tests.support.matrix import config
from tests.support.scheduler import Harness
from tests.support.tiny_models import write_tiny_model

STEADY_STEPS = 48


def steady(tmp_path: Path, batch: int, depth: int) -> Harness:
    """A batch that only decodes from here on, past its first steps."""
    harness = Harness(tmp_path, depth=depth, num_slots=64, num_pages=2048, max_len=512, step_tokens=4096, page_size=16)
    for number in range(1, batch + 1):
        harness.add(number, 16, max_tokens=200)
    for _ in range(8):
        harness.scheduler.turn()
    return harness


def profile(harness: Harness) -> tuple[Counter[str], int, int]:
    """Calls by kind and name, net allocated blocks, and messages of STEADY_STEPS turns."""
    calls: Counter[str] = Counter()

    def count(frame: object, event: str, arg: object) -> None:
        if event == "call":
            calls["py " + frame.f_code.co_qualname] += 1  # type: ignore[attr-defined]
        elif event == "c_call":
            calls["c " + getattr(arg, "__name__", "?")] += 1

    messages = len(harness.outlet.messages)
    harness.outlet.messages.clear()
    gc.collect()
    gc.disable()
    try:
        blocks = sys.getallocatedblocks()
        sys.setprofile(count)
        for _ in range(STEADY_STEPS):
            harness.scheduler.turn()
        sys.setprofile(None)
        sent = len(harness.outlet.messages)
        harness.outlet.messages.clear()
        grown = sys.getallocatedblocks() - blocks
    finally:
        sys.setprofile(None)
        gc.enable()
    assert messages >= 0
    return calls, grown, sent


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_calls_of_a_steady_step_do_not_depend_on_the_batch(tmp_path: Path, depth: int) -> None:
    results = {}
    (tmp_path / "first").mkdir()
    profile(steady(tmp_path / "first", 4, depth))  # what Python keeps of a first run is not a step's cost
    for batch in (8, 64):
        folder = tmp_path / str(batch)
        folder.mkdir()
        results[batch] = profile(steady(folder, batch, depth))
    small, large = results[8], results[64]
    assert small[0] == large[0]
    assert abs(small[1] - large[1]) <= STEADY_STEPS  # dictionaries of counters may resize; no block per row
    assert small[2] == large[2] == STEADY_STEPS


def test_a_step_sends_one_message_for_all_rows(tmp_path: Path) -> None:
    harness = steady(tmp_path, 64, 0)
    harness.outlet.messages.clear()
    harness.scheduler.turn()
    (message,) = harness.outlet.messages
    assert len(unpack_i32(message.tokens.tokens)) == 64


def test_a_steady_step_uploads_nothing_between_reservations(tmp_path: Path) -> None:
    harness = steady(tmp_path, 8, 0)
    plans = []
    launch = harness.device.launch

    def spy(plan: object) -> object:
        plans.append(plan)
        return launch(plan)  # type: ignore[arg-type]

    harness.device.launch = spy  # type: ignore[method-assign,assignment]
    for _ in range(2 * RESERVED_IF_ROOMY):
        harness.scheduler.turn()
    assert sum(any(updates is not None for updates in plan.pages) for plan in plans) == 2
    assert all(plan.joins is None for plan in plans)
    assert len({plan.rows_version for plan in plans}) == 1


class OpCounter(TorchDispatchMode):
    """Counts the torch operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def test_torch_operations_of_a_steady_step_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = resolve(str(write_tiny_model(tmp_path / "model")))
    ops = {}
    for batch in (8, 64):
        options = config(max_running_requests=64, max_total_tokens=16_384, chunked_prefill_size=2048)
        harness = Harness.of_model(tmp_path, options, model)
        for number in range(1, batch + 1):
            harness.add(number, 16, max_tokens=200)
        harness.turn(8)
        with OpCounter() as counter:
            harness.turn(STEADY_STEPS)
        ops[batch] = counter.ops
    assert ops[8] == ops[64]
    assert ops[8].total() > 0


def test_every_layer_is_a_sign_of_life(tmp_path: Path) -> None:
    model = resolve(str(write_tiny_model(tmp_path / "model", num_hidden_layers=3)))
    signs: list[int] = []
    workload, device = build(config(), model, lambda: signs.append(1))
    workload.accept(
        TokenizedRequest(
            1, 0, 0, "", pack_i32([5, 6]), SamplingParams(temperature=0.0, max_tokens=1, seed=1), True, b"", Stamps()
        )
    )
    plan = workload.plan()
    assert plan is not None
    device.collect(device.launch(plan))
    assert len(signs) == 3
