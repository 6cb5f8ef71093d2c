"""The channel between the main process and an HTTP worker: order, size, answers, and the end of a peer."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from engine.errors import UnavailableError
from engine.ipc.channel import Channel
from engine.ipc.control import AbortCall, Answer, End, FromWorker, InFlight, MetricsCall, ToWorker


class Ends:
    """Both ends of one pair, with what came out of each."""

    def __init__(self) -> None:
        self.at_main: list[object] = []
        self.at_worker: list[object] = []
        self.lost = asyncio.Event()
        self.main: Channel[FromWorker] = Channel(FromWorker, self.at_main.append, lambda: None)
        self.worker: Channel[ToWorker] = Channel(ToWorker, self.at_worker.append, self.lost.set)

    async def connect(self) -> Ends:
        one, other = socket.socketpair()
        await self.main.connect(one)
        await self.worker.connect(other)
        return self


async def test_messages_of_any_size_arrive_in_order() -> None:
    ends = await Ends().connect()
    for index in range(100):
        ends.worker.send(InFlight(index))
    large = Answer(0, data=bytes(3_000_000))
    answer = asyncio.create_task(ends.worker.call(MetricsCall))
    while len(ends.at_main) < 101:
        await asyncio.sleep(0.001)
    assert ends.at_main[:100] == [InFlight(index) for index in range(100)]
    call = ends.at_main[100]
    assert isinstance(call, MetricsCall)
    large.call = call.call
    ends.main.send(large)
    assert (await answer).data == large.data
    ends.main.close()


async def test_answers_find_their_calls() -> None:
    ends = await Ends().connect()
    calls = [asyncio.create_task(ends.main.call(lambda n, i=i: AbortCall(n, str(i), None))) for i in range(3)]
    while len(ends.at_worker) < 3:
        await asyncio.sleep(0.001)
    for call in reversed(ends.at_worker):
        assert isinstance(call, AbortCall)
        ends.worker.send(Answer(call.call, count=10 + int(call.label or 0)))
    assert [(await call).count for call in calls] == [10, 11, 12]
    ends.main.close()


async def test_no_answer_is_an_error_in_time() -> None:
    ends = await Ends().connect()
    with pytest.raises(UnavailableError):
        await ends.main.call(MetricsCall, timeout_s=0.02)
    # Too late: nobody waits any more.
    ends.worker.send(Answer(1))
    await asyncio.sleep(0.01)
    ends.main.close()


async def test_the_end_of_a_peer_is_heard_and_ends_its_calls() -> None:
    ends = await Ends().connect()
    call = asyncio.create_task(ends.worker.call(MetricsCall))
    while not ends.at_main:
        await asyncio.sleep(0.001)
    ends.main.send(End())
    ends.main.close()
    await asyncio.wait_for(ends.lost.wait(), 2)
    # What was sent before the end has arrived.
    assert ends.at_worker == [End()]
    with pytest.raises(UnavailableError):
        await call
    with pytest.raises(UnavailableError):
        await ends.worker.call(MetricsCall)
    ends.worker.send(InFlight(1))


async def _cancelled_connect() -> None:
    ours, theirs = socket.socketpair()
    channel: Channel[FromWorker] = Channel(FromWorker, lambda message: None, lambda: None)
    connecting = asyncio.ensure_future(channel.connect(ours))
    while channel._transport is None:
        await asyncio.sleep(0)
    assert not connecting.done()
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    await asyncio.sleep(0.01)
    channel.send(End())
    with pytest.raises(UnavailableError):
        await channel.call(MetricsCall)
    channel.close()
    theirs.setblocking(False)
    assert theirs.recv(1) == b""
    theirs.close()
    assert ours.fileno() == -1


def test_a_connect_that_is_cancelled_closes_its_end() -> None:
    # The server's event loop: the standard one leaves nothing half-way.
    uvloop.run(_cancelled_connect())
