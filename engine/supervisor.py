"""Starts the processes by module name, watches them, and ends or restarts them together."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineError, ProcessDiedError, StartupError
from engine.ipc.child import CHILD_SIGNALS, ChildConfig, Layout
from engine.model_files.types import ModelFiles

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Seconds a child may take to end after SIGTERM before SIGKILL."""
MAX_RESTARTS = 5
"""Restarts within RESTART_WINDOW_S after which the supervisor gives up."""
RESTART_WINDOW_S = 300.0
_CHILD_ENVIRONMENT = {"GOMP_SPINCOUNT": "4000", "TOKENIZERS_PARALLELISM": "true"}
"""Unless the user says otherwise. The spin count is how long an idle OpenMP thread burns its core before it sleeps: the
library's default starves the other processes of the same cores (docs/decisions.md has the figures)."""
_LOCK = "lock"
_MAX_SOCKET_PATH = 100
"""A Unix socket path may hold 107 bytes; the names in the run directory take the rest."""


class Supervisor:
    """One group of processes, all of one start. Lives on the event loop of its front."""

    def __init__(self, config: EngineConfig, model: ModelFiles, client: EngineClient) -> None:
        self.config = config
        self.model = model
        self.client = client
        self.failed: asyncio.Future[ProcessDiedError] = asyncio.get_running_loop().create_future()
        """Set when a process died and --on-crash says exit, or restarting did not help."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}
        self._died: asyncio.Future[ProcessDiedError] | None = None
        self._run_dir: RunDir | None = None
        self._layout: Layout | None = None
        self._restarts: list[float] = []
        self._restarting: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Bring everything up, warm-up included. Raises EngineError (with an exit code) if something does not."""
        try:
            await self._start_group()
        except OSError as error:
            raise StartupError(f"the processes cannot be started: {error}") from error
        self.client.state, self.client.reason = "ready", ""

    async def _start_group(self) -> None:
        begin = time.monotonic()
        self._run_dir = RunDir()
        layout = Layout(str(self._run_dir.path), num_tokenizers=self.config.process.tokenizer_workers)
        self._layout = layout
        board = layout.board(create=True)
        self._died = asyncio.get_running_loop().create_future()
        front = self._child_config("front 0", layout)
        self.client.attach(self.model, layout, board, front.hello())
        for name in layout.processes:
            if not name.startswith("front"):
                self._spawn(self._child_config(name, layout))
        await self._until_ready(layout, begin + self.config.process.start_timeout)
        log.info("event=processes_ready seconds=%.1f", time.monotonic() - begin)
        if not self.config.http.skip_server_warmup:
            begin = time.monotonic()
            await self._or_death(self.client.warm_up(), self.config.process.start_timeout, "warm-up")
            log.info("event=warm seconds=%.1f", time.monotonic() - begin)

    def _child_config(self, name: str, layout: Layout) -> ChildConfig:
        return ChildConfig(name, os.getpid(), layout, self.config.without_secrets(), self.model)

    def _spawn(self, child: ChildConfig) -> None:
        """Start one process; its config travels in an anonymous file on an inherited descriptor."""
        module = f"{child.name.split()[0]}_proc"
        fd = os.memfd_create("child-config", os.MFD_CLOEXEC)
        try:
            os.write(fd, msgspec.msgpack.encode(child))
            os.lseek(fd, 0, os.SEEK_SET)
            # -P: never import from whatever directory the user happens to stand in.
            command = [sys.executable, "-P", "-m", module, str(fd)]
            environment = {**_CHILD_ENVIRONMENT, **os.environ}
            # A signal to the whole group must not end a child before it knows what to do with it (StopFlag).
            signal.pthread_sigmask(signal.SIG_BLOCK, CHILD_SIGNALS)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(fd,), env=environment)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, CHILD_SIGNALS)
            os.close(fd)
        self._children[child.name] = process
        pidfd = os.pidfd_open(process.pid)
        self._pidfds[child.name] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, child.name)

    async def _until_ready(self, layout: Layout, deadline: float) -> None:
        expected = {name for name in layout.processes if not name.startswith("front")}
        while expected - self.client.ready.keys():
            if self.client.fatal is not None:
                raise self.client.fatal
            self.client.on_ready.clear()
            missing = ", ".join(sorted(expected - self.client.ready.keys()))
            await self._or_death(self.client.on_ready.wait(), deadline - time.monotonic(), f"start of {missing}")

    async def _or_death(self, work: Awaitable[object], timeout_s: float, what: str) -> None:
        """Await `work`, but no longer than `timeout_s` and not beyond the death of a process."""
        assert self._died is not None
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._died}, timeout=max(timeout_s, 0), return_when=asyncio.FIRST_COMPLETED)
            if self._died.done():
                raise self._died.result()
            if not task.done():
                raise StartupError(f"{what} took longer than --start-timeout {self.config.process.start_timeout:g} s.")
            task.result()
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, EngineError):
                await task

    # -- death ----------------------------------------------------------------------------------------------------

    def _on_exit(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._pidfds[name])
        status = self._children[name].wait()
        if self._stopping:
            return
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        error = ProcessDiedError(f"The {name.split()[0]} process {how}.")
        if 0 < status < 128 and self.client.state == "starting":
            error = self._own_words(name, error)
            error.exit_code = status
        log.error("event=process_died name=%r how=%r", name, how)
        if self._died is not None and not self._died.done():
            self._died.set_result(error)
        if self.client.state in ("ready", "draining"):
            self._lost(error)

    def _own_words(self, name: str, error: ProcessDiedError) -> ProcessDiedError:
        """What a process that could not start has said itself, if it has."""
        assert self._layout is not None
        try:
            return ProcessDiedError(self._layout.reason_file(name).read_text(encoding="utf-8"))
        except OSError:
            return error

    def _lost(self, error: ProcessDiedError) -> None:
        """A process died while the group served: fail what runs, then exit or restart."""
        restart = self.config.process.on_crash == "restart" and self.client.state == "ready"
        self.client.state = "restarting" if restart else "failed"
        self.client.reason = error.message
        self.client.fail_all(error)
        if restart:
            self._restarting = asyncio.get_running_loop().create_task(self._restart(error))
        elif not self.failed.done():
            self.failed.set_result(error)

    async def _restart(self, error: ProcessDiedError) -> None:
        while True:
            now = time.monotonic()
            self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S] + [now]
            if len(self._restarts) > MAX_RESTARTS:
                log.error("event=restart_given_up restarts=%d window_s=%d", MAX_RESTARTS, RESTART_WINDOW_S)
                self.client.state = "failed"
                self.failed.set_result(error)
                return
            log.warning("event=restart number=%d", len(self._restarts))
            try:
                await self._end_group(signal.SIGKILL)
                await self._start_group()
            except Exception as failure:
                log.error("event=restart_failed error=%s", failure, exc_info=not isinstance(failure, EngineError))
                await asyncio.sleep(1.0)
            else:
                if self.client.state == "restarting":
                    self.client.state, self.client.reason = "ready", ""
                return

    # -- the end --------------------------------------------------------------------------------------------------

    async def end_restart(self) -> None:
        """Give up a restart that is under way: the server is to end."""
        if self._restarting is not None:
            self._restarting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._restarting

    async def stop(self) -> None:
        """End every process: SIGTERM, then SIGKILL; remove the run directory. Can be called in any state."""
        self._stopping = True
        await self.end_restart()
        self.client.mark_stopped()
        await self._end_group(signal.SIGTERM)

    async def _end_group(self, how: signal.Signals) -> None:
        stopping, self._stopping = self._stopping, True
        for process in self._children.values():
            if process.poll() is None:
                process.send_signal(how)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while any(process.poll() is None for process in self._children.values()):
            if time.monotonic() > deadline:
                for name, process in self._children.items():
                    if process.poll() is None:
                        log.error("event=kill name=%r: it did not end in time", name)
                        process.kill()
                        process.wait()
                break
            await asyncio.sleep(0.01)
        loop = asyncio.get_running_loop()
        for pidfd in self._pidfds.values():
            loop.remove_reader(pidfd)
            os.close(pidfd)
        self._children.clear()
        self._pidfds.clear()
        self.client.detach()
        if self._run_dir is not None:
            self._run_dir.remove()
            self._run_dir = None
        self._stopping = stopping


class RunDir:
    """A private directory (0700) with a name unique to this start, locked for as long as its owner lives."""

    def __init__(self) -> None:
        """Make one, after sweeping those whose owner is gone. Raises StartupError, OSError."""
        base = Path(os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0] or os.environ.get("XDG_RUNTIME_DIR", ""))
        if not base.is_absolute() or not os.access(base, os.W_OK) or len(str(base)) > _MAX_SOCKET_PATH - 40:
            base = Path(tempfile.gettempdir())
        prefix = f"engine-{os.getuid()}-"
        if len(str(base)) + len(prefix) + 8 > _MAX_SOCKET_PATH - 20:
            raise StartupError(f"{base} is too long for Unix sockets; set XDG_RUNTIME_DIR or TMPDIR to a shorter path.")
        for old in base.glob(f"{prefix}*"):
            _sweep(old)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
        # The lock, not a pid, says that the owner lives: pids mean nothing to another container.
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(old: Path) -> None:
    """Remove a run directory that nobody holds locked."""
    try:
        fd = os.open(old / _LOCK, os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(old, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(fd)
