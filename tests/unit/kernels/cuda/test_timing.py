"""How graphs are timed, over a stand-in for torch.cuda."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from kernels.cuda import timing
from kernels.cuda.timing import GraphTimer, elapsed, time_graph


@dataclass
class FakeCuda:
    """A device whose clock advances by what calls say they take; a graph's replay takes what its calls took."""

    now: float = 0.0
    stream: str = "main"
    captured: list[float] | None = None
    fails_to_end: bool = False
    launches: list[float] = field(default_factory=list)

    def launch(self, seconds: float) -> None:
        self.launches.append(seconds)
        if self.captured is None:
            self.now += seconds
        else:
            self.captured.append(seconds)

    def synchronize(self) -> None:
        assert self.captured is None

    def current_stream(self) -> str:
        return self.stream

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def get_device_properties(self, device: object) -> SimpleNamespace:
        return SimpleNamespace(L2_cache_size=1 << 20)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Graph:
        def __init__(self) -> None:
            self.seconds = 0.0

        def replay(self) -> None:
            fake.now += self.seconds

    class Capture:
        def __init__(self, graph: Graph, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            self.graph = graph

        def __enter__(self) -> None:
            fake.captured, fake.stream = [], "capture"

        def __exit__(self, *_: object) -> None:
            assert fake.captured is not None
            self.graph.seconds, fake.captured = sum(fake.captured), None
            if fake.fails_to_end:
                raise RuntimeError("invalidated")
            fake.stream = "main"

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = fake.now

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

    stand_in = SimpleNamespace(
        CUDAGraph=Graph,
        graph=Capture,
        Event=Event,
        **{name: getattr(fake, name) for name in ("synchronize", "current_stream", "set_stream")},
        get_device_properties=fake.get_device_properties,
    )
    monkeypatch.setattr(
        timing, "torch", SimpleNamespace(cuda=stand_in, zeros=torch.zeros, int32=torch.int32, amax=torch.amax)
    )
    return fake


def _taking(cuda: FakeCuda, seconds: float) -> Callable[[], None]:
    return lambda: cuda.launch(seconds)


def test_a_call_and_a_graph_of_calls(cuda: FakeCuda) -> None:
    assert elapsed(_taking(cuda, 0.25)) == pytest.approx(0.25)
    assert time_graph([_taking(cuda, 1e-3), _taking(cuda, 2e-3)], replays=3) == pytest.approx(3e-3)
    assert cuda.launches == [0.25, 1e-3, 2e-3]


def test_a_capture_that_fails_leaves_the_stream_as_it_was(cuda: FakeCuda) -> None:
    cuda.fails_to_end = True
    with pytest.raises(RuntimeError, match="invalidated"):
        time_graph([_taking(cuda, 1e-3)], replays=1)
    assert cuda.stream == "main"


@pytest.mark.parametrize(("seconds", "num_calls"), [(1e-6, 10), (4e-4, 2), (5e-2, 1)])
def test_flushing_is_not_counted(
    seconds: float, num_calls: int, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphTimer, "_flush", lambda self: cuda.launch(4e-5))
    timer = GraphTimer(torch.device("cpu"))
    for _ in range(2):
        assert timer(_taking(cuda, seconds)) == pytest.approx(seconds)
    # Twice outside a graph each time: to be ready, and to know how long it takes.
    assert cuda.launches.count(seconds) == 2 * (2 + num_calls)
