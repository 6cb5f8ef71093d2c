"""The main process's side of HTTP workers: processes that do nothing, with the test at the other end of their pairs."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine import workers as module
from engine.client import EngineClient
from engine.config import EngineConfig, HttpOptions
from engine.ipc.board import Heartbeat, State
from engine.ipc.channel import Channel
from engine.ipc.child import Layout
from engine.ipc.control import (
    AbortCall,
    Answer,
    Attach,
    Full,
    InFlight,
    SamplesCall,
    StateChange,
    ToWorker,
    WorkerConfig,
)
from engine.ipc.messages import Hello
from engine.spawn import MAX_RESTARTS
from engine.workers import Worker, Workers
from tests.support.fake_client import tiny_files

HELLO = Hello("test", "s", "c")


class Peer:
    """What a worker says and hears; it confirms what it is told unless it is `hung`."""

    def __init__(self, front: int, end: socket.socket, process: subprocess.Popen[bytes]) -> None:
        self.front, self.end, self.process = front, end, process
        self.hung = False
        self.heard: list[ToWorker] = []
        self.channel: Channel[ToWorker] = Channel(ToWorker, self._receive, lambda: None)
        self._connecting = asyncio.ensure_future(self.channel.connect(end))

    def _receive(self, message: ToWorker) -> None:
        self.heard.append(message)
        if not self.hung and isinstance(message, Attach | StateChange | AbortCall | SamplesCall) and message.call:
            self.channel.send(Answer(message.call, count=1))


class Rig:
    """Two workers, attached to a start of which nothing but the board exists."""

    def __init__(self, run_dir: Path) -> None:
        self.peers: dict[int, Peer] = {}
        self.spawned = 0
        self.spawn_error: OSError | None = None
        self.born_hung = False
        self.died: list[str] = []
        self.client = EngineClient(EngineConfig(http=HttpOptions(http_workers=3)))
        self.workers = Workers(self.client)
        self.workers.on_death = self._on_death
        self.run_dir = run_dir
        self.starts = 0

    def _on_death(self, worker: Worker, how: str) -> None:
        self.died.append(worker.name)
        self.workers.start_again(worker)

    def spawn(self, name: str, config: msgspec.Struct, fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        assert isinstance(config, WorkerConfig)
        if self.spawn_error is not None:
            raise self.spawn_error
        process = subprocess.Popen(["sleep", "60"])
        self.spawned += 1
        peer = Peer(config.front, socket.socket(fileno=os.dup(fds[0])), process)
        peer.hung = self.born_hung
        self.peers[config.front] = peer
        return process

    def attach(self) -> None:
        self.starts += 1
        path = self.run_dir / str(self.starts)
        path.mkdir()
        layout = Layout(str(path), num_fronts=3)
        self.board = layout.board(create=True)
        self.client.attach(tiny_files(), layout, self.board, HELLO)
        for front in (1, 2):
            self.beat(front)

    def beat(self, front: int, work: int = 0) -> None:
        Heartbeat(self.board, front).beat(0, work)

    def go_silent(self, front: int, for_s: float) -> None:
        self.board.cells[front, 2] -= int(for_s * 1e9)

    def takers(self) -> list[str]:
        return [worker.name for worker in self.workers.takers()]


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    monkeypatch.setattr(module, "spawn", made.spawn)
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "ATTACH_TIMEOUT_S", 0.1)
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.05)
    made.attach()
    await made.workers.start()
    await until(lambda: len(made.client.ready) == 2)
    made.client.set_state("ready")
    yield made
    made.workers.on_death = lambda worker, how: None
    await made.workers.end()
    made.client.close()


async def until(condition: object) -> None:
    async with asyncio.timeout(5):
        while not condition():  # ty: ignore[call-non-callable]
            await asyncio.sleep(0.002)


async def test_workers_serve_once_they_have_confirmed(rig: Rig) -> None:
    assert rig.takers() == ["front 1", "front 2"]
    assert set(rig.client.ready) == {"front 1", "front 2"}
    told = rig.peers[1].heard[0]
    assert isinstance(told, Attach)
    assert (told.hello.sender, told.state) == ("front 1", "starting")


async def test_a_hung_worker_is_replaced_when_it_does_not_take_up_a_new_start(rig: Rig) -> None:
    hung, well = rig.peers[1], rig.peers[2]
    hung.hung = True
    rig.client.set_state("restarting", "a crash")
    rig.attach()
    rig.go_silent(1, 60.0)
    # It keeps nobody waiting who speaks to all.
    await asyncio.wait_for(rig.workers.tell_ready(), module.READY_TIMEOUT_S / 2)
    rig.client.set_state("ready")
    await until(lambda: rig.died == ["front 1"])
    assert hung.process.returncode == -9
    await until(lambda: rig.peers[1] is not hung and "front 1" in rig.client.ready)
    assert rig.peers[2] is well
    await until(lambda: any(isinstance(m, StateChange) and m.state == "ready" for m in well.heard))
    rig.beat(1)
    assert rig.takers() == ["front 1", "front 2"]


async def test_a_new_worker_may_take_long_to_attach(rig: Rig) -> None:
    rig.born_hung = True
    rig.peers[1].process.kill()
    await until(lambda: rig.spawned == 3)
    await asyncio.sleep(2 * module.ATTACH_TIMEOUT_S)
    assert rig.takers() == ["front 2"]
    late = rig.peers[1]
    await until(lambda: late.heard)
    told = late.heard[0]
    assert isinstance(told, Attach)
    assert told.state == "ready"
    late.channel.send(Answer(told.call))
    rig.beat(1)
    await until(lambda: rig.takers() == ["front 1", "front 2"])
    assert rig.died == ["front 1"]


async def test_each_worker_has_its_own_restarts_and_ends_with_them(rig: Rig) -> None:
    for count in range(MAX_RESTARTS):
        for peer in (rig.peers[1], rig.peers[2]):
            peer.process.kill()
        await until(lambda count=count: rig.spawned == 2 * (count + 2))
    rig.peers[1].process.kill()
    await until(lambda: rig.board.read(1).state is State.GIVEN_UP)
    spawned = rig.spawned
    await asyncio.sleep(0.3)
    assert rig.spawned == spawned
    for index in range(3, len(rig.board.cells)):
        Heartbeat(rig.board, index).state(State.READY)
    rig.board.cells[2, 1] = State.READY
    rig.beat(2)
    report = rig.client.health()
    assert (report.ok, report.reason) == (True, "front 1 died too often and is not started again")
    # The board of a later start says so too.
    rig.attach()
    assert rig.board.read(1).state is State.GIVEN_UP


async def test_a_start_that_finds_no_descriptor_is_repeated_and_leaks_none(rig: Rig) -> None:
    rig.spawn_error = OSError(24, "Too many open files")
    before = len(os.listdir("/proc/self/fd"))
    dead = rig.peers[1]
    dead.process.kill()
    await until(lambda: rig.died)
    dead.channel.close()
    await asyncio.sleep(0.1)
    assert rig.spawned == 2
    # Those of the dead one: its two pairs' ends here, its pidfd, and the end that this test held.
    assert len(os.listdir("/proc/self/fd")) == before - 4
    rig.spawn_error = None
    await until(lambda: rig.spawned == 3)
    await until(lambda: "front 1" in rig.client.ready)


async def test_no_restart_once_the_server_drains(rig: Rig) -> None:
    rig.client.set_state("draining")
    rig.peers[1].process.kill()
    await until(lambda: rig.died)
    await asyncio.sleep(0.05)
    assert rig.spawned == 2


async def test_the_silent_and_the_full_get_no_connections(rig: Rig) -> None:
    rig.go_silent(1, module.HUNG_S)
    assert rig.takers() == ["front 2"]
    rig.peers[2].channel.send(Full(True))
    await until(lambda: rig.takers() == [])
    rig.peers[2].channel.send(Full(False))
    rig.beat(1)
    await until(lambda: rig.takers() == ["front 1", "front 2"])


async def test_an_abort_waits_little_for_the_hung_and_not_for_the_lost(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ABORT_TIMEOUT_S", 0.05)
    assert await rig.workers.abort("x", None) == 2
    rig.peers[1].hung = True
    assert await rig.workers.abort("x", None) == 1
    rig.go_silent(1, module.LOST_S)
    heard = len(rig.peers[1].heard)
    assert await rig.workers.abort("x", None) == 1
    await asyncio.sleep(0.01)
    assert len(rig.peers[1].heard) == heard


async def test_a_drain_counts_what_is_reported_or_on_the_board_but_not_the_lost(rig: Rig) -> None:
    rig.beat(1, work=3)
    rig.client.set_state("draining")
    assert rig.workers.in_flight == 3
    rig.peers[2].channel.send(InFlight(4))
    await until(lambda: rig.workers.in_flight == 7)
    rig.beat(1, work=0)
    assert rig.workers.in_flight == 4
    rig.go_silent(2, module.LOST_S)
    assert rig.workers.in_flight == 0


async def test_workers_that_never_served_are_killed_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_TIMEOUT_S", 60.0)
    rig.born_hung = True
    rig.peers[1].process.kill()
    await until(lambda: rig.spawned == 3)
    rig.client.detach()
    ending = asyncio.create_task(rig.workers.end())
    await until(lambda: rig.peers[1].process.returncode == -9)
    assert rig.peers[2].process.poll() is None
    rig.peers[2].process.kill()
    await asyncio.wait_for(ending, 5)


async def test_a_start_that_is_cancelled_can_be_ended(rig: Rig) -> None:
    worker = Worker(9)
    config = WorkerConfig(9, 0, os.getpid(), 0, rig.client.config, -1, -1)
    start = asyncio.create_task(worker.start(config, lambda message: None, lambda ended: None))
    await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await asyncio.sleep(0.02)
    worker.send(InFlight(1))
    assert worker.process is not None
    worker.process.kill()
    worker.forget()
