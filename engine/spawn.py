"""Starting a child process by module name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from engine.ipc.child import CHILD_SIGNALS

_CHILD_ENVIRONMENT = {"GOMP_SPINCOUNT": "4000", "TOKENIZERS_PARALLELISM": "true"}
"""Unless the user says otherwise. The spin count is how long an idle OpenMP thread burns its core before it sleeps: the
library's default starves the other processes of the same cores (docs/decisions.md has the figures)."""


MAX_RESTARTS = 5
"""Restarts within RESTART_WINDOW_S that something may have."""
RESTART_WINDOW_S = 300.0


class RestartBudget:
    """Counts how often something was started again."""

    def __init__(self) -> None:
        self._at_s: list[float] = []

    def take(self) -> int:
        """Count a restart; its number among those of the last RESTART_WINDOW_S, or 0 if these are too many."""
        now_s = time.monotonic()
        self._at_s = [at_s for at_s in self._at_s if now_s - at_s < RESTART_WINDOW_S] + [now_s]
        number = len(self._at_s)
        return number if number <= MAX_RESTARTS else 0


def spawn(module: str, config: msgspec.Struct, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start `module` with its config in an anonymous file on an inherited descriptor, and `fds` beside it.

    Raises OSError.
    """
    fd = os.memfd_create("child-config", os.MFD_CLOEXEC)
    try:
        os.write(fd, msgspec.msgpack.encode(config))
        os.lseek(fd, 0, os.SEEK_SET)
        # -P: never import from whatever directory the user happens to stand in.
        command = [sys.executable, "-P", "-m", module, str(fd)]
        environment = {**_CHILD_ENVIRONMENT, **os.environ}
        # A signal to the whole group must not end a child before it knows what to do with it (StopFlag).
        signal.pthread_sigmask(signal.SIG_BLOCK, CHILD_SIGNALS)
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd, *fds), env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, CHILD_SIGNALS)
        os.close(fd)


def how_it_ended(status: int) -> str:
    """The end of a sentence about a process, from Popen's return code."""
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
