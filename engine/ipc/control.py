"""Messages between the main process and its HTTP workers, over one socket pair each (engine/ipc/channel.py).

A worker lives as long as the server, the processes behind it only until a crash: so these messages do not go over the
ZeroMQ sockets in the run directory of one start.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from engine.config import EngineConfig
from engine.errors import ErrorInfo
from engine.ipc.child import Layout
from engine.ipc.messages import Hello
from engine.model_files.types import ModelFiles

Sample: TypeAlias = tuple[str, dict[str, str], float]
"""One line of /metrics: name, labels, value."""
Facts: TypeAlias = dict[str, dict[str, str | int | float]]
"""By process name, what it reported with Ready."""


class WorkerConfig(msgspec.Struct, frozen=True):
    """Everything an HTTP worker needs at its start. `config` holds the API key: workers check it."""

    front: int
    life: int
    """How many workers had this number before."""
    parent_pid: int
    created: int
    """When the server began, in Unix seconds."""
    config: EngineConfig
    control_fd: int
    connections_fd: int
    """A socket on which accepted connections arrive, one descriptor a packet."""


class Attach(msgspec.Struct, tag="attach", array_like=True):
    """Main -> worker: the processes of a new start, and the server's state. Answered with Answer once it has both."""

    call: int
    model: ModelFiles
    layout: Layout
    hello: Hello
    state: str
    reason: str
    facts: Facts


class Detach(msgspec.Struct, tag="detach", array_like=True):
    """Main -> worker: the processes of the last Attach are gone."""


class StateChange(msgspec.Struct, tag="state", array_like=True):
    """Main -> worker: the server's state. Answered with Answer unless `call` is 0."""

    call: int
    state: str
    reason: str
    facts: Facts


class FailAll(msgspec.Struct, tag="fail_all", array_like=True):
    """Main -> worker: end everything in flight with `error`."""

    error: ErrorInfo


class End(msgspec.Struct, tag="end", array_like=True):
    """Main -> worker: send what waits to be sent, then end."""


class AbortCall(msgspec.Struct, tag="abort_call", array_like=True):
    """Main -> worker: abort these requests of yours; worker -> main: abort them wherever they are.

    Answer.count says how many there were.
    """

    call: int
    label: str | None
    prefix: str | None


class SamplesCall(msgspec.Struct, tag="samples_call", array_like=True):
    """Main -> worker. Answer.samples has what this worker has counted."""

    call: int


class MetricsCall(msgspec.Struct, tag="metrics_call", array_like=True):
    """Worker -> main. Answer.data is the text of /metrics."""

    call: int


class InFlight(msgspec.Struct, tag="in_flight", array_like=True):
    """Worker -> main while draining: requests that it still serves; sent at once and at every change."""

    count: int


class Full(msgspec.Struct, tag="full", array_like=True):
    """Worker -> main: whether it has too few descriptors left for new connections; sent at every change."""

    full: bool


class Answer(msgspec.Struct, tag="answer", array_like=True):
    """Either -> either: the answer to a call."""

    call: int
    count: int = 0
    data: bytes = b""
    samples: list[Sample] = []


ToWorker: TypeAlias = Attach | Detach | StateChange | FailAll | End | AbortCall | SamplesCall | Answer
FromWorker: TypeAlias = InFlight | Full | AbortCall | MetricsCall | Answer
