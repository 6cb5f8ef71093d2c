"""The life of one server: port, model, processes, HTTP, notify, drain, end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import uvloop
from aiohttp import web

from engine import __version__
from engine.client import EngineClient
from engine.config import EngineConfig
from engine.errors import PortInUseError, UnavailableError
from engine.ipc.child import raise_file_limit, setup_logging
from engine.model_files.resolve import resolve
from engine.model_files.types import ModelFiles
from engine.sd_notify import Notifier
from engine.server.app import create_app
from engine.server.connections import Acceptor
from engine.server.fronts import MainFront
from engine.server.keys import FRONTS, METRICS
from engine.server.serving import FLUSH_TIMEOUT_S, set_up
from engine.supervisor import Supervisor
from engine.workers import Workers

log = logging.getLogger(__name__)
T = TypeVar("T")
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(config: EngineConfig) -> int:
    """Serve until a signal or a failure; returns the exit status."""
    setup_logging(config.process.log_level, "front 0")
    raise_file_limit()
    listener = bind(config.http.host, config.http.port)
    try:
        return uvloop.run(_Server(config, listener).serve())
    finally:
        listener.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; raises PortInUseError with what to do."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PortInUseError(f"cannot listen on {host}:{port}: {reason}. Choose another --host or --port.") from error
    listener.setblocking(False)
    return listener


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread that does not keep the process alive: a download must not outlast a stop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[], None]) -> None:
        if not future.done():
            set_outcome()

    def work() -> None:
        try:
            result = function()
        except BaseException as error:
            outcome = functools.partial(future.set_exception, error)
        else:
            outcome = functools.partial(future.set_result, result)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=work, name="resolve", daemon=True).start()
    return await future


def ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Let no further SIGTERM or SIGINT, which the loop's handlers end with, turn a clean end into a death by signal."""
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


class _Server:
    def __init__(self, config: EngineConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._notifier = Notifier()
        self._signals = 0

    async def serve(self) -> int:
        loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        for sig in STOP_SIGNALS:
            loop.add_signal_handler(sig, self._on_signal, sig)
        client = EngineClient(self._config)
        workers = Workers(client)
        app = create_app(client)
        app[FRONTS] = main_front = MainFront(client, app[METRICS], workers)
        workers.render = main_front.metrics
        runner, server = await set_up(app)
        acceptor = None
        if self._config.http.http_workers > 1:
            acceptor = Acceptor(self._listener, server, workers)
            acceptor.start()
        else:
            await web.SockSite(runner, self._listener).start()
        host, port = self._listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.info("event=listening version=%s url=%s state=starting", __version__, url)
        watchdog = asyncio.create_task(self._watchdog(client))
        try:
            return await self._serve_model(client, workers, url)
        finally:
            watchdog.cancel()
            if acceptor is not None:
                acceptor.stop()
            await asyncio.gather(runner.cleanup(), workers.end())
            client.close()
            ignore_signals(loop)

    async def _serve_model(self, client: EngineClient, workers: Workers, url: str) -> int:
        model = await self._unless_stopped(in_daemon_thread(self._resolve))
        if model is None:
            return 0
        supervisor = Supervisor(self._config, model, client, workers)
        try:
            begin = time.monotonic()
            if await self._unless_stopped(supervisor.start()) is None and self._stop.is_set():
                return 0
            log.info("event=ready url=%s model=%r seconds=%.1f", url, client.model_name, time.monotonic() - begin)
            gc.collect()
            gc.freeze()
            self._notifier.ready()
            self._notifier.status(f"serving {client.model_name}")
            stop = asyncio.create_task(self._stop.wait())
            await asyncio.wait({stop, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            if supervisor.failed.done():
                return await self._give_up(client, supervisor)
            return await self._drain(client, supervisor)
        finally:
            await supervisor.stop()

    def _resolve(self) -> ModelFiles:
        options = self._config.model
        begin = time.monotonic()
        model = resolve(
            options.model,
            load_format=options.load_format,
            tokenizer=options.tokenizer,
            revision=options.revision,
        )
        log.info("event=model_found name=%r format=%s seconds=%.1f", model.name, model.format, time.monotonic() - begin)
        return model

    async def _drain(self, client: EngineClient, supervisor: Supervisor) -> int:
        """Refuse what is new, let what runs finish until --drain-timeout, end the rest with an error."""
        workers = supervisor.workers

        def in_flight() -> int:
            return client.in_flight + workers.in_flight

        client.set_state("draining", "shutting down")
        await supervisor.end_restart()
        self._notifier.stopping()
        timeout_s = self._config.http.drain_timeout
        deadline = time.monotonic() + timeout_s
        await workers.until_counted(min(1.0, timeout_s))
        log.info("event=draining in_flight=%d timeout_s=%g", in_flight(), timeout_s)
        while in_flight() and time.monotonic() < deadline and not self._hurry.is_set():
            if supervisor.failed.done():
                return await self._give_up(client, supervisor)
            await asyncio.sleep(0.02)
        if in_flight():
            log.warning("event=drain_timeout cut=%d", in_flight())
            client.fail_all(UnavailableError("The server shut down before this request could finish."))
            await asyncio.sleep(0)
        log.info("event=stopped")
        return 0

    async def _give_up(self, client: EngineClient, supervisor: Supervisor) -> int:
        """A process died: readers get their error, /health says 503 for a moment, then the server ends."""
        self._notifier.stopping()
        error = supervisor.failed.result()
        await asyncio.sleep(FLUSH_TIMEOUT_S / 2)
        log.error("event=exit error=%s", error)
        return error.exit_code

    async def _watchdog(self, client: EngineClient) -> None:
        """Tell systemd that we live; a hung scheduler is kept from it, a start or drain is not."""
        interval_s = self._notifier.watchdog_interval_s
        while interval_s is not None:
            if client.state != "ready" or client.health().ok:
                self._notifier.watchdog()
            await asyncio.sleep(interval_s)

    async def _unless_stopped(self, work: Awaitable[T]) -> T | None:
        task = asyncio.ensure_future(work)
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None

    def _on_signal(self, sig: signal.Signals) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("event=signal name=%s", sig.name)
            self._stop.set()
        else:
            self._hurry.set()
