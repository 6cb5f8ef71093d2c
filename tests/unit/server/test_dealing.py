"""Accepted connections go to the fronts in turn; one that takes none is passed over."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from typing import cast

import pytest
from aiohttp import ClientSession, TCPConnector, web

from engine.server import connections
from engine.server.connections import Acceptor, Receiver
from engine.workers import Workers


class FakeWorker:
    """Stands for a worker process: its end of the socket pair is served in this one."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here.setblocking(False)
        self.full = False

    def hand_over(self, connection: socket.socket) -> bool:
        if not self.full:
            socket.send_fds(self.here, [b"c"], [connection.fileno()])
        return not self.full


class FakeWorkers:
    def __init__(self) -> None:
        self.all = [FakeWorker(), FakeWorker()]

    def takers(self) -> list[FakeWorker]:
        return self.all


async def serve(name: str) -> tuple[web.AppRunner, web.Server]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=name)

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    assert runner.server is not None
    return runner, runner.server


class Fronts:
    """A main process and two workers."""

    def __init__(self) -> None:
        self.workers = FakeWorkers()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/"

    async def ask(self, count: int) -> str:
        """The names of who answered `count` new connections."""
        async with ClientSession(connector=TCPConnector(force_close=True)) as client:
            names = []
            for _ in range(count):
                async with client.get(self.url) as response:
                    names.append(await response.text())
            return "".join(names)


@pytest.fixture
async def fronts() -> AsyncIterator[Fronts]:
    made = Fronts()
    runners = []
    receivers = []
    for name, worker in zip("bc", made.workers.all, strict=True):
        runner, server = await serve(name)
        runners.append(runner)
        receivers.append(Receiver(worker.there, server))
        receivers[-1].start()
    runner, server = await serve("a")
    runners.append(runner)
    acceptor = Acceptor(made.listener, server, cast(Workers, made.workers))
    acceptor.start()
    yield made
    acceptor.stop()
    for receiver in receivers:
        receiver.stop()
    for runner in runners:
        await runner.cleanup()
    for worker in made.workers.all:
        worker.here.close()
    made.listener.close()


async def test_fronts_take_turns(fronts: Fronts) -> None:
    assert await fronts.ask(7) == "bcabcab"


async def test_who_takes_none_is_passed_over(fronts: Fronts) -> None:
    fronts.workers.all[0].full = True
    assert await fronts.ask(4) == "caca"
    fronts.workers.all.clear()
    assert await fronts.ask(3) == "aaa"


async def test_a_client_that_has_gone_already_harms_nobody(fronts: Fronts) -> None:
    for _ in range(6):
        with socket.create_connection(fronts.listener.getsockname()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert len(await fronts.ask(3)) == 3


async def test_without_descriptors_accepting_rests_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", 0.05)
    tries = 0

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    fronts = Fronts()
    fronts.workers.all.clear()
    runner, server = await serve("a")
    with Exhausted(fileno=fronts.listener.detach()) as listener:
        acceptor = Acceptor(listener, server, cast(Workers, fronts.workers))
        acceptor.start()
        async with asyncio.timeout(5):
            assert await fronts.ask(2) == "aa"
        acceptor.stop()
    assert caplog.text.count("accept_failed") == 2
    await runner.cleanup()
