"""What every child does the same way around its own work: reach its peers, and say that it is ready."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import zmq

from engine.ipc.board import Heartbeat, State
from engine.ipc.child import ChildConfig
from engine.ipc.messages import Ready
from engine.ipc.sockets import Pusher


def connect(ctx: zmq.Context, child: ChildConfig, kind: str) -> dict[str, Pusher]:
    """Sending ends towards all processes of a kind (`front`, `scheduler 0 rank`, ...), by name, in board order."""
    layout, hello = child.layout, child.hello()
    return {
        name: Pusher(ctx, layout.address(name), hello) for name in layout.processes if name.rpartition(" ")[0] == kind
    }


def announce(
    child: ChildConfig,
    heartbeat: Heartbeat,
    fronts: Iterable[Pusher],
    facts: dict[str, str | int | float] | None = None,
) -> None:
    """Loaded and serving: freeze what lives long, tell the board and the fronts."""
    gc.collect()
    gc.freeze()
    heartbeat.state(State.READY)
    for front in fronts:
        front.send(Ready(child.name, facts or {}))
