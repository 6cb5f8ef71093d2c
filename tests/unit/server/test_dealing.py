"""Accepted connections go to the fronts in turn; one that takes none is passed over."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
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
        self.heard: list[bool] = []
        """What it has said of whether it is full."""

    def hand_over(self, connection: socket.socket) -> bool:
        if not self.full:
            socket.send_fds(self.here, [b"c"], [connection.fileno()])
        return not self.full


class FakeWorkers:
    def __init__(self) -> None:
        self.all = [FakeWorker(), FakeWorker()]

    def takers(self) -> list[FakeWorker]:
        return [worker for worker in self.all if not worker.heard or not worker.heard[-1]]


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
        receivers.append(Receiver(worker.there, server, worker.heard.append))
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


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """Let this process open `left` more descriptors and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    holes = []
    while (fd := os.dup(0)) <= highest:
        holes.append(fd)
    os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, (fd + left, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for hole in holes:
            os.close(hole)


async def get(client: socket.socket) -> bytes:
    loop = asyncio.get_running_loop()
    client.setblocking(False)
    await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = b""
    while data := await loop.sock_recv(client, 4096):
        answer += data
    return answer


async def test_a_worker_without_descriptors_loses_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LOOK_EVERY_S", 0.02)
    worker = FakeWorker()
    runner, server = await serve("b")
    receiver = Receiver(worker.there, server, worker.heard.append)
    receiver.start()
    clients = []
    for _ in range(3):
        client, theirs = socket.socketpair()
        clients.append(client)
        worker.hand_over(theirs)
        theirs.close()
    with descriptors(0):
        await asyncio.sleep(0.1)
        assert worker.heard == [True]
    async with asyncio.timeout(5):
        for client in clients:
            assert (await get(client)).endswith(b"b")
            client.close()
    assert worker.heard == [True, False]
    receiver.stop()
    worker.here.close()
    await runner.cleanup()


async def test_a_main_process_short_of_descriptors_leaves_connections_to_the_workers(
    fronts: Fronts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "PAUSE_S", 0.05)
    room = False
    monkeypatch.setattr(connections, "has_room", lambda held: held is not fronts.listener or room)
    assert await fronts.ask(4) == "bcbc"
    fronts.workers.all.clear()
    asked = asyncio.create_task(fronts.ask(2))
    await asyncio.sleep(0.12)
    assert not asked.done()
    room = True
    assert await asked == "aa"
    assert "too few descriptors left" in caplog.text


def test_a_part_of_the_descriptors_is_kept() -> None:
    with socket.socket() as held:
        with descriptors(200):
            assert connections.descriptors_left(held) == 200
            assert connections.has_room(held)
        with descriptors(1):
            assert not connections.has_room(held)
        with descriptors(0):
            assert connections.descriptors_left(held) == 0
