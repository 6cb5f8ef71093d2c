"""From the listening socket to the fronts: the main process accepts and deals connections out, workers take them over.

One process accepts, so that long streams spread evenly: docs/decisions.md has the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from engine.workers import Workers

log = logging.getLogger("engine.server")

PORTION = 64
"""Most connections taken in one turn of the event loop."""
PAUSE_S = 1.0
"""Rest after an accept for which the process or the machine had no descriptor or memory left."""


class Adopter:
    """Gives connected sockets to the HTTP server of this process."""

    def __init__(self, server: web.Server) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()

    def adopt(self, connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._adopt(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _adopt(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        # A client that has gone already is no news.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(self._server, connection)


class Acceptor:
    """The main process's end: accepts and deals out, to each front in its turn."""

    def __init__(self, listener: socket.socket, server: web.Server, workers: Workers) -> None:
        self._listener = listener
        self._adopter = Adopter(server)
        self._workers = workers
        self._turn = 0
        self._pause: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._pause = None
        asyncio.get_running_loop().add_reader(self._listener, self._on_readable)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()

    def _on_readable(self) -> None:
        for _ in range(PORTION):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                log.error("event=accept_failed error=%s", error)
                self.stop()
                self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self.start)
                return
            self._deal(connection)

    def _deal(self, connection: socket.socket) -> None:
        takers = self._workers.takers()
        while True:
            self._turn = (self._turn + 1) % (len(takers) + 1)
            if self._turn == 0:
                self._adopter.adopt(connection)
                return
            if takers[self._turn - 1].hand_over(connection):
                connection.close()
                return


class Receiver:
    """A worker's end: takes over what the main process has accepted."""

    def __init__(self, connections: socket.socket, server: web.Server) -> None:
        self._connections = connections
        self._adopter = Adopter(server)
        connections.setblocking(False)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._connections, self._on_readable)

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connections)
        self._connections.close()

    def _on_readable(self) -> None:
        for _ in range(PORTION):
            try:
                data, fds, _, _ = socket.recv_fds(self._connections, 1, 1)
            except (BlockingIOError, InterruptedError):
                return
            if not data:
                asyncio.get_running_loop().remove_reader(self._connections)
                return
            if not fds:
                log.error("event=connection_lost reason='no descriptor left'")
            for fd in fds:
                self._adopter.adopt(socket.socket(fileno=fd))
