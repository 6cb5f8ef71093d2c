"""Names of the processes that share a model, and who is connected to them."""

from __future__ import annotations

import msgspec
import zmq

from engine.config import EngineConfig
from engine.ipc.child import ChildConfig, Layout
from engine.ipc.peers import connect
from tests.support.recorded import model


def test_ranks_are_processes_of_their_own() -> None:
    layout = Layout("/nowhere", num_schedulers=2, num_ranks=3)
    ranks = [name for name in layout.processes if name.startswith("scheduler")]
    zero, one = ("scheduler 0", "scheduler 1")
    assert ranks == [zero, one, f"{zero} rank 1", f"{zero} rank 2", f"{one} rank 1", f"{one} rank 2"]
    assert layout.rank_of(one) == (one, 0)
    assert layout.rank_of("scheduler 1 rank 2") == (one, 2)
    assert layout.meeting(zero) != layout.meeting(one)
    assert layout.address("scheduler 1 rank 2") == "ipc:///nowhere/scheduler-1-rank-2"


def test_only_their_scheduler_is_connected_to_ranks() -> None:
    layout = Layout("/nowhere", num_schedulers=2, num_ranks=3)
    child = ChildConfig("scheduler 1", 1, layout, EngineConfig(), model(16))
    with zmq.Context() as ctx:
        found = {kind: connect(ctx, child, kind) for kind in ("scheduler", "scheduler 1 rank", "front")}
        assert list(found["scheduler"]) == ["scheduler 0", "scheduler 1"]
        assert list(found["scheduler 1 rank"]) == ["scheduler 1 rank 1", "scheduler 1 rank 2"]
        assert list(found["front"]) == ["front 0"]
        for pusher in (pusher for ends in found.values() for pusher in ends.values()):
            pusher.close()
    assert layout == msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)
