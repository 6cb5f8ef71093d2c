"""What /health tells: the server's state, and what the heartbeat board says of every process. Nobody is asked."""

from __future__ import annotations

import msgspec

from engine.ipc.board import Board, State
from engine.ipc.child import Layout

SCHEDULER_SILENCE_S = 5.0
"""A scheduler whose heartbeat is older is taken for hung."""
OTHERS_SILENCE_S = 30.0
"""The same for all other processes."""


class Health(msgspec.Struct):
    """When ok, `reason` names at most what the server goes on without."""

    ok: bool
    state: str
    reason: str
    processes: list[dict[str, object]]


def health_report(state: str, reason: str, layout: Layout | None, board: Board | None) -> Health:
    """The health of a server in `state`; `layout` and `board` are those of the present start, if there is one."""
    processes: list[dict[str, object]] = []
    problems = []
    losses = []
    if board is not None and layout is not None:
        for index, name in enumerate(layout.processes):
            is_front = name.startswith("front")
            if is_front and layout.num_fronts == 1:
                continue  # it is the one that answers
            line = board.read(index)
            up, age = line.state is State.READY, line.age_s
            limit = SCHEDULER_SILENCE_S if name.startswith("scheduler") else OTHERS_SILENCE_S
            if up and age > limit:
                problems.append(f"{name} has been silent for {age:.1f} s")
            elif line.state is State.GIVEN_UP:
                losses.append(f"{name} died too often and is not started again")
            elif is_front and not up:
                problems.append(f"{name} is being started")
            processes.append(
                {
                    "name": name,
                    "up": up,
                    "heartbeat_age_s": round(age, 3) if up else None,
                    "step": line.step,
                    "at_work": line.work,
                }
            )
    reason = "; ".join(problems + losses) if state == "ready" else reason
    return Health(state == "ready" and not problems, state, reason, processes)
