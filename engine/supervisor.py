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
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import EngineError, ProcessDiedError, StartupError
from engine.ipc.child import ChildConfig, Layout
from engine.model_files.types import ModelFiles
from engine.sharing import check_shares
from engine.spawn import MAX_RESTARTS, RESTART_WINDOW_S, RestartBudget, how_it_ended, spawn
from engine.workers import Worker, Workers

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
"""Seconds a child may take to end after SIGTERM before SIGKILL."""
_LOCK = "lock"
_MAX_SOCKET_PATH = 100
"""A Unix socket path may hold 107 bytes; the names in the run directory take the rest."""


class Supervisor:
    """One group of processes, all of one start; and the HTTP workers, which outlive it. Lives on its front's loop."""

    def __init__(self, config: EngineConfig, model: ModelFiles, client: EngineClient, workers: Workers) -> None:
        self.config = config
        self.model = model
        self.client = client
        self.workers = workers
        workers.on_death = self._on_worker_death
        self.failed: asyncio.Future[ProcessDiedError] = asyncio.get_running_loop().create_future()
        """Set when a process died and --on-crash says exit, or restarting did not help."""
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._pidfds: dict[str, int] = {}
        self._died: asyncio.Future[ProcessDiedError] | None = None
        self._run_dir: RunDir | None = None
        self._layout: Layout | None = None
        self._budget = RestartBudget()
        self._restarting: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Bring everything up, warm-up included. Raises EngineError (with an exit code) if something does not."""
        check_shares(self.model.config, self.config.process.tp_size)
        try:
            await self._start_group()
        except OSError as error:
            raise StartupError(f"the processes cannot be started: {error}") from error

    async def _start_group(self) -> None:
        begin = time.monotonic()
        self._run_dir = RunDir()
        options = self.config.process
        layout = Layout(
            str(self._run_dir.path),
            num_fronts=self.config.http.http_workers,
            num_tokenizers=options.tokenizer_workers,
            num_ranks=options.tp_size,
        )
        self._layout = layout
        board = layout.board(create=True)
        self._died = asyncio.get_running_loop().create_future()
        front = self._child_config("front 0", layout)
        self.client.attach(self.model, layout, board, front.hello())
        for name in layout.processes:
            if not name.startswith("front"):
                self._spawn(self._child_config(name, layout))
        if self.client.state == "starting":
            await self.workers.start()
        await self._until_ready(layout, begin + self.config.process.start_timeout)
        log.info("event=processes_ready seconds=%.1f", time.monotonic() - begin)
        if not self.config.http.skip_server_warmup:
            begin = time.monotonic()
            await self._or_death(self.client.warm_up(), self.config.process.start_timeout, "warm-up")
            log.info("event=warm seconds=%.1f", time.monotonic() - begin)
        # Whoever hears from one front that the server is ready must find every front so.
        await self._or_death(self.workers.tell_ready(), self.config.process.start_timeout, "the start of HTTP workers")
        self.client.set_state("ready")

    def _child_config(self, name: str, layout: Layout) -> ChildConfig:
        return ChildConfig(name, os.getpid(), layout, self.config.without_secrets(), self.model)

    def _spawn(self, child: ChildConfig) -> None:
        """Start one process and watch for its end."""
        process = spawn(f"{child.name.split()[0]}_proc", child)
        self._children[child.name] = process
        pidfd = os.pidfd_open(process.pid)
        self._pidfds[child.name] = pidfd
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, child.name)

    async def _until_ready(self, layout: Layout, deadline: float) -> None:
        # A restart waits for no worker: one that hangs holds back nobody but its own clients.
        with_workers = self.client.state == "starting"
        expected = {name for name in layout.processes if with_workers or not name.startswith("front")} - {"front 0"}
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
        how = how_it_ended(status)
        error = ProcessDiedError(f"The process {name} {how}.")
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

    def _on_worker_death(self, worker: Worker, how: str) -> None:
        """Its connections are lost, nothing else: on restart only the worker itself is started again."""
        log.error("event=process_died name=%r how=%r", worker.name, how)
        error = ProcessDiedError(f"The HTTP worker {worker.name} {how}.")
        if self.client.state == "starting":
            if self._died is not None and not self._died.done():
                self._died.set_result(error)
        elif self.config.process.on_crash == "exit":
            if self.client.state in ("ready", "draining"):
                self._lost(error)
        elif self.client.state in ("ready", "restarting"):
            self.workers.start_again(worker)

    def _lost(self, error: ProcessDiedError) -> None:
        """A process died while the group served: fail what runs, then exit or restart."""
        restart = self.config.process.on_crash == "restart" and self.client.state == "ready"
        self.client.set_state("restarting" if restart else "failed", error.message)
        self.client.fail_all(error)
        if restart:
            self._restarting = asyncio.get_running_loop().create_task(self._restart(error))
        elif not self.failed.done():
            self.failed.set_result(error)

    def _give_up(self, error: ProcessDiedError) -> None:
        self.client.set_state("failed", error.message)
        self.client.fail_all(error)
        if not self.failed.done():
            self.failed.set_result(error)

    async def _restart(self, error: ProcessDiedError) -> None:
        while self.client.state == "restarting":
            number = self._budget.take()
            if number == 0:
                log.error("event=restart_given_up restarts=%d window_s=%d", MAX_RESTARTS, RESTART_WINDOW_S)
                self._give_up(error)
                return
            log.warning("event=restart number=%d", number)
            try:
                await self._end_group(signal.SIGKILL)
                await self._start_group()
            except Exception as failure:
                log.error("event=restart_failed error=%s", failure, exc_info=not isinstance(failure, EngineError))
                await asyncio.sleep(1.0)
            else:
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
        try:
            await self._end_children(how)
            self.client.detach()
        finally:
            if self._run_dir is not None:
                self._run_dir.remove()
                self._run_dir = None
            self._stopping = stopping

    async def _end_children(self, how: signal.Signals) -> None:
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
        lock = None
        while lock is None:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=base))
            try:
                lock = _lock(self.path)
            except OSError:
                # Without a lock file nobody would ever sweep it.
                shutil.rmtree(self.path, ignore_errors=True)
                raise
        self._lock = lock

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _lock(new: Path) -> int | None:
    """Lock a new run directory; the lock's descriptor, or None if another start has swept the directory meanwhile.

    The lock, not a pid, says that the owner lives: pids mean nothing to another container.
    """
    fd = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), os.stat(new / _LOCK)):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(fd)
    return None


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
