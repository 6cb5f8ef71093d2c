"""What the tests of a CUDA device's faults do, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import ModelOptions
from engine.ipc.messages import Finish
from tests.support.device_matrix import Run, TinyModel, configured, greedy_cases, tiny_model
from tests.support.device_spy import Crowd, PromptFailure, Spy
from tests.support.scheduler import Harness

FLOAT32 = ModelOptions(dtype="float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(("device", "depth"), [("cpu", 0), ("delayed", 2)])
def test_a_step_without_memory_fails_alone(
    model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, depth: int
) -> None:
    run = Run(company=True, depth=depth, cache="cold")
    config = configured(device, run, model=FLOAT32, max_running_requests=4)
    made = greedy_cases(400, [20, 30, 40, 50, 60, 70], 20)
    expected = Harness.of_model(tmp_path, config, model.files)
    harness = Harness.of_model(tmp_path, config, model.files)
    spy, failure = Spy(harness), PromptFailure(monkeypatch)
    for number, case in enumerate(made, start=1):
        expected.add(number, case.prompt, max_tokens=case.max_tokens)
        harness.add(number, case.prompt, max_tokens=case.max_tokens)
        if number == 2:
            harness.turn(5)
            failure.due = True
    harness.run()
    expected.run()
    assert {1, 2, 3} <= spy.victims
    assert set(harness.errors) == spy.victims
    others = set(range(1, 7)) - spy.victims
    assert {5, 6} <= others
    assert {number: harness.tokens[number] for number in others} == {
        number: expected.tokens[number] for number in others
    }
    for done in (expected, harness):
        done.device.close()


def test_a_crowd_leaves_nothing_behind(model: TinyModel, tmp_path: Path) -> None:
    run = Run(depth=2, cache="cold", chunk=64, small_pool=True)
    harness = Harness.of_model(tmp_path, configured("delayed", run, model=FLOAT32), model.files)
    Crowd(harness).churn(250)
    harness.device.close()
    assert not harness.errors and harness.planner.num_retractions > 0
    assert Finish.ABORT in harness.finish.values()
