"""A server process: started on a free port, watched until healthy, stopped with everything it started."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType

import msgspec
import psutil

PORT = "{port}"
"""Stands in a command for the port that is chosen when it starts."""
_POLL_S = 0.1
_TERM_TIMEOUT_S = 20.0
_HELPER_TIMEOUT_S = 5.0
_LOG_LINES = 15
_PR_SET_PDEATHSIG = 1


class ServerFailed(Exception):
    """A server did not start or went away; the message holds the end of its log."""


class Launch(msgspec.Struct, frozen=True):
    """How to start a server. Two levels with equal launches share one process."""

    command: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    start_timeout_s: float = 120.0

    def shown(self) -> str:
        """As one would type it, environment first."""
        return " ".join([*(f"{name}={value}" for name, value in self.env), *self.command])


class Server:
    """A running server, to be used as a context manager. Raises ServerFailed if it does not become healthy."""

    def __init__(self, launch: Launch, log: Path) -> None:
        self._launch = launch
        self._log = log
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.start_s = 0.0
        """Seconds from the start to the first healthy answer."""

    def __enter__(self) -> Server:
        command = [part.replace(PORT, str(self._port)) for part in self._launch.command]
        our_pid = os.getpid()
        begin = time.monotonic()
        with self._log.open("wb") as out:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **dict(self._launch.env)},
                    # Ctrl-C is for this tool alone: it then stops the servers itself, one by one.
                    start_new_session=True,
                    preexec_fn=lambda: _die_with(our_pid),
                )
            except OSError as error:
                raise ServerFailed(f"cannot run {command[0]}: {error.strerror or error}") from error
        try:
            self._wait_healthy()
        except BaseException:
            self.stop()
            raise
        self.start_s = time.monotonic() - begin
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def model_name(self) -> str:
        """The first name in /v1/models."""
        with _open(f"{self.url}/v1/models", timeout_s=30.0) as response:
            return json.load(response)["data"][0]["id"]

    def failure(self, what: str) -> ServerFailed:
        """An error that says what happened, with the last lines of the log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return ServerFailed("\n    ".join([what, *(line[:300] for line in lines)]))

    def check(self) -> None:
        """Raises ServerFailed if the process has ended."""
        if self._process.poll() is not None:
            raise self.failure(f"the server ended with status {self._process.returncode}")

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is still there, helpers of the server included."""
        try:
            root = psutil.Process(self._process.pid)
            family = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            family = []
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_TERM_TIMEOUT_S)
        for send in (psutil.Process.terminate, psutil.Process.kill):
            for process in filter(_alive, family):
                with contextlib.suppress(psutil.NoSuchProcess):
                    send(process)
            deadline = time.monotonic() + _HELPER_TIMEOUT_S
            while any(map(_alive, family)) and time.monotonic() < deadline:
                time.sleep(_POLL_S / 10)
        self._process.wait()

    def _wait_healthy(self) -> None:
        deadline = time.monotonic() + self._launch.start_timeout_s
        while True:
            self.check()
            try:
                with _open(f"{self.url}/health", timeout_s=5.0) as response:
                    if response.status == 200:
                        return
            except (OSError, urllib.error.URLError):
                pass
            if time.monotonic() > deadline:
                raise self.failure(f"the server is not healthy after {self._launch.start_timeout_s:.0f} s")
            time.sleep(_POLL_S)


def cpu_seconds(pid: int) -> dict[str, float]:
    """CPU seconds used so far by a process (`front`) and by each of its descendants, by title."""
    spent: dict[str, float] = {}
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return spent
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            title = "front" if process.pid == pid else _title(process)
            times = process.cpu_times()
            spent[title] = spent.get(title, 0.0) + times.user + times.system
    return spent


def machine_cpu_seconds() -> float:
    """CPU seconds that anything on this machine, its host's other guests included, has used so far."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def _alive(process: psutil.Process) -> bool:
    """Whether it still runs. An orphan that has ended may wait for init to take notice."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _title(process: psutil.Process) -> str:
    command = " ".join(process.cmdline()) or process.name()
    if command.startswith("engine: "):
        return command.removeprefix("engine: ").split()[0]
    return next((part for part in command.split() if "resource_tracker" in part), Path(command.split()[0]).name)


def _open(url: str, timeout_s: float) -> http.client.HTTPResponse:
    # No proxy, whatever the environment says: the server is on this machine.
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout_s)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _die_with(parent: int) -> None:
    """In the child: SIGTERM when the thread that started it ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
