"""From the listening socket to the fronts: the main process accepts and deals connections out, workers take them over.

One process accepts, so that long streams spread evenly: docs/decisions.md has the figures.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from engine.workers import Worker, Workers

log = logging.getLogger("engine.server")

PORTION = 64
"""Most connections taken in one turn of the event loop."""
PAUSE_S = 1.0
"""Rest after an accept for which the process or the machine had no descriptor or memory left."""
LOOK_EVERY_S = 0.25
"""Between two looks of a full worker at whether descriptors have become free."""
RESERVE = 64
"""Descriptors that are kept from connections where the limit allows: for processes that are started, sockets, files."""


def descriptors_left(held: socket.socket) -> int:
    """About how many more descriptors this process may open; 0 is exact. `held` is any socket of its own.

    The kernel gives out the lowest number that is free, so all below it are taken. Where some above it are taken too,
    there are fewer left; but the highest number is reached only once all are taken.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        lowest = os.dup(held.fileno())
    except OSError:
        return 0
    os.close(lowest)
    return limit - lowest


def has_room(held: socket.socket) -> bool:
    """Whether this process may take connections without touching its reserve of descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return descriptors_left(held) > min(RESERVE, limit // 8)


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
            takers, room = self._workers.takers(), has_room(self._listener)
            if not takers and not room:
                self._rest("too few descriptors left")
                return
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                self._rest(error)
                return
            self._deal(connection, takers, room)

    def _rest(self, reason: OSError | str) -> None:
        log.error("event=accept_failed error=%s", reason)
        self.stop()
        self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self.start)

    def _deal(self, connection: socket.socket, takers: list[Worker], room: bool) -> None:
        """Give a connection to whose turn it is: one of `takers`, or this process if it has `room`."""
        for _ in range(len(takers) + 1):
            self._turn = (self._turn + 1) % (len(takers) + 1)
            if self._turn == 0:
                if room:
                    break
            elif takers[self._turn - 1].hand_over(connection):
                connection.close()
                return
        # Also when nobody has room: it is accepted already.
        self._adopter.adopt(connection)


class Receiver:
    """A worker's end: takes over what the main process has accepted."""

    def __init__(self, connections: socket.socket, server: web.Server, on_full: Callable[[bool], None]) -> None:
        """`on_full` is told when there are too few descriptors left for more connections, and when there are enough."""
        self._connections = connections
        self._adopter = Adopter(server)
        self._on_full = on_full
        self._look: asyncio.TimerHandle | None = None
        """While full: the next look at whether it still is."""
        connections.setblocking(False)

    def start(self) -> None:
        asyncio.get_running_loop().add_reader(self._connections, self._on_readable)

    def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
        asyncio.get_running_loop().remove_reader(self._connections)
        self._connections.close()

    def _on_readable(self) -> None:
        for _ in range(PORTION):
            if self._look is None and not has_room(self._connections):
                self._on_full(True)
                self._look_later()
            if not descriptors_left(self._connections):
                # What was read now would be lost. It waits in the socket.
                asyncio.get_running_loop().remove_reader(self._connections)
                return
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

    def _look_later(self) -> None:
        self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_again)

    def _look_again(self) -> None:
        self.start()
        if has_room(self._connections):
            self._look = None
            self._on_full(False)
        else:
            self._look_later()
