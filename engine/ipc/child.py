"""What a child process is told at its start (msgpack on an inherited fd), and how it begins its life."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.config import EngineConfig, config_hash
from engine.errors import EngineError, StartupError
from engine.ipc.board import Board, Heartbeat, State
from engine.ipc.messages import Hello, schema_hash
from engine.model_files.types import ModelFiles

_PR_SET_PDEATHSIG = 1


class Layout(msgspec.Struct, frozen=True):
    """Names and places of one start: who exists and where everyone listens."""

    run_dir: str
    num_fronts: int = 1
    num_tokenizers: int = 1
    num_schedulers: int = 1
    num_ranks: int = 1
    """Processes that share a scheduler's model; the scheduler itself is rank 0."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Process names in board order."""
        return (
            *(f"front {i}" for i in range(self.num_fronts)),
            *(f"scheduler {i}" for i in range(self.num_schedulers)),
            *(f"scheduler {i} rank {k}" for i in range(self.num_schedulers) for k in range(1, self.num_ranks)),
            "detokenizer 0",
            *(f"tokenizer {i}" for i in range(self.num_tokenizers)),
        )

    def tokenizer_of(self, request: int) -> str:
        """The tokenizer worker of a request; its abort takes the same way."""
        return f"tokenizer {request % self.num_tokenizers}"

    def route(self, request: int) -> str:
        """The scheduler group that serves a request, from its number alone: whoever asks gets the same answer."""
        return f"scheduler {request % self.num_schedulers}"

    def rank_of(self, name: str) -> tuple[str, int]:
        """The scheduler whose model a process holds a share of, and its rank among those that do."""
        scheduler, _, rank = name.partition(" rank ")
        return scheduler, int(rank or 0)

    def meeting(self, scheduler: str) -> Path:
        """The file through which the ranks of a scheduler find each other."""
        return Path(self.run_dir) / f"{scheduler.replace(' ', '-')}.meeting"

    def address(self, name: str) -> str:
        """ZeroMQ address the process listens on."""
        return f"ipc://{self.run_dir}/{name.replace(' ', '-')}"

    def reason_file(self, name: str) -> Path:
        """Where a process that cannot start says why."""
        return Path(self.run_dir) / f"{name.replace(' ', '-')}.reason"

    def board(self, *, create: bool = False) -> Board:
        return Board(Path(self.run_dir) / "board", len(self.processes), create=create)


class ChildConfig(msgspec.Struct, frozen=True):
    """Everything a child needs."""

    name: str
    parent_pid: int
    layout: Layout
    config: EngineConfig
    model: ModelFiles

    def hello(self) -> Hello:
        return Hello(self.name, schema_hash(), config_hash(self.config, self.model))


def setup_logging(level: str, name: str) -> None:
    """One line per event on stderr, key=value."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {name}: %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )


def raise_file_limit() -> None:
    """Lift RLIMIT_NOFILE to its hard limit: a thousand clients need more than the usual 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies; raise StartupError if it is dead already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise StartupError(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:
        raise StartupError("the parent process ended during start-up")


CHILD_SIGNALS = {signal.SIGTERM, signal.SIGINT}
"""Blocked from a child's first moment until StopFlag has handlers for them."""


class StopFlag:
    """SIGTERM seen? The process works on until the front has stopped or its time is over."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CHILD_SIGNALS)

    def _on_term(self, signum: int, frame: object) -> None:
        self.asked = True


def begin(fd: int) -> tuple[ChildConfig, Heartbeat, Board, StopFlag]:
    """Read the config from `fd` and set up what every child has: signals, title, logs, limits, heartbeat."""
    import setproctitle

    stop = StopFlag()
    with os.fdopen(fd, "rb") as pipe:
        child = msgspec.msgpack.decode(pipe.read(), type=ChildConfig)
    die_with_parent(child.parent_pid)
    setproctitle.setproctitle(f"engine: {child.name}")
    setup_logging(child.config.process.log_level, child.name)
    raise_file_limit()
    board = child.layout.board()
    heartbeat = Heartbeat(board, child.layout.processes.index(child.name))
    return child, heartbeat, board, stop


def until_stopped(stop: StopFlag, board: Board) -> Callable[[], bool]:
    """A condition for a child's loop: SIGTERM came, and the front has stopped.

    A SIGTERM sent to the whole group, or to one process by mistake, must not end it before the front has finished what
    runs. The front's own end is certain: its parent kills what does not go, and a dead parent takes its children along.
    """
    return lambda: stop.asked and board.read(0).state is State.STOPPED


def fail_start(child: ChildConfig, error: EngineError) -> int:
    """Leave the reason of a failed start where the supervisor finds it; returns the exit status."""
    logging.getLogger(__name__).error("event=fatal error=%s", error)
    child.layout.reason_file(child.name).write_text(error.message, encoding="utf-8")
    return error.exit_code
