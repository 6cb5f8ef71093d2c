"""A client that is one of several fronts: followers, health of all, and what a dead process of its number left over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from engine.client import ClientState, EngineClient
from engine.config import EngineConfig, HttpOptions
from engine.errors import EngineError, UnavailableError
from engine.health import OTHERS_SILENCE_S, health_report
from engine.ipc.board import Heartbeat, State
from engine.ipc.child import Layout
from engine.ipc.messages import (
    Abort,
    Accepted,
    FrontOutput,
    GenerateRequest,
    Hello,
    TextDelta,
    TokenInput,
    ToTokenizer,
    pack_i32,
)
from engine.ipc.sockets import Puller, Pusher, context
from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams
from tests.support.fake_client import tiny_files

HELLO = Hello("test", "s", "c")


class Seen:
    """A follower that writes down what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def attach(self, model: ModelFiles, layout: Layout, hello: Hello) -> None:
        self.heard.append(f"attach {layout.num_fronts}")

    def detach(self) -> None:
        self.heard.append("detach")

    def set_state(self, state: ClientState, reason: str) -> None:
        self.heard.append(f"{state} {reason}")

    def fail_all(self, error: EngineError) -> None:
        self.heard.append(f"fail {error}")


@pytest.fixture
async def third(tmp_path: Path) -> AsyncIterator[tuple[EngineClient, Layout]]:
    """Front 1 of two, in its third life, attached and ready."""
    layout = Layout(str(tmp_path), num_fronts=2)
    client = EngineClient(EngineConfig(http=HttpOptions(http_workers=2)), front=1, life=2)
    client.attach(tiny_files(), layout, layout.board(create=True), HELLO)
    client.set_state("ready")
    yield client, layout
    client.close()


@pytest.fixture
async def tokenizer(third: tuple[EngineClient, Layout]) -> AsyncIterator[Puller[ToTokenizer]]:
    ctx: zmq.Context = context()
    yield Puller(ctx, third[1].address("tokenizer 0"), ToTokenizer, HELLO)
    ctx.destroy(linger=0)


async def drain(puller: Puller[ToTokenizer], count: int) -> list[ToTokenizer]:
    got: list[ToTokenizer] = []
    async with asyncio.timeout(5):
        while len(got) < count:
            got += puller.drain()
            await asyncio.sleep(0.002)
    await asyncio.sleep(0.02)
    return got + list(puller.drain())


async def test_output_of_a_former_life_is_aborted_once(
    third: tuple[EngineClient, Layout], tokenizer: Puller[ToTokenizer]
) -> None:
    client, layout = third
    own = client.generate(TokenInput(pack_i32([1])), SamplingParams(), stream=True)
    own.close()
    gone = [1 << 56 | life << 40 | 7 for life in (0, 1)]
    ctx = context()
    detokenizer = Pusher(ctx, layout.address("front 1"), HELLO)
    for step in range(3):
        deltas = [TextDelta(number, 0, step, pack_i32([5]), "x") for number in (own.request, *gone)]
        detokenizer.send(FrontOutput(step, [Accepted(gone[0], 0, 3)], deltas, [], []))
    got = await drain(tokenizer, 4)
    assert [type(message) for message in got] == [GenerateRequest, Abort, Abort, Abort]
    assert [message.request for message in got if isinstance(message, Abort)] == [own.request, *gone]
    assert own.request >> 40 == 1 << 16 | 2
    ctx.destroy(linger=0)


async def test_followers_hear_what_the_client_does(tmp_path: Path) -> None:
    client, seen = EngineClient(EngineConfig()), Seen()
    client.followers.append(seen)
    layout = Layout(str(tmp_path), num_fronts=3)
    client.attach(tiny_files(), layout, layout.board(create=True), HELLO)
    client.set_state("ready")
    client.fail_all(UnavailableError("over"))
    client.detach()
    assert seen.heard == ["detach", "attach 3", "ready ", "fail over", "detach"]
    client.close()


async def test_a_front_beats_while_it_is_attached(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    board = layout.board(create=True)
    client = EngineClient(EngineConfig())
    client.attach(tiny_files(), layout, board, HELLO)
    begin = board.read(0)
    assert begin.state is State.READY
    await asyncio.sleep(0.6)
    assert board.read(0).time_ns > begin.time_ns
    assert not client.is_silent(0, 1.0)
    client.mark_stopped()
    await asyncio.sleep(0.6)
    assert board.read(0).state is State.STOPPED
    client.close()


def test_health_names_every_front_where_there_are_several(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path), num_fronts=2)
    board = layout.board(create=True)
    lines = [Heartbeat(board, index) for index in range(len(layout.processes))]
    for line in lines:
        line.state(State.READY)
    report = health_report("ready", "", layout, board)
    assert report.ok
    assert [process["name"] for process in report.processes] == list(layout.processes)
    board.mark(1, State.STARTING)
    report = health_report("ready", "", layout, board)
    assert (report.ok, report.reason) == (False, "front 1 is being started")
    assert [process["up"] for process in report.processes[:2]] == [True, False]
    # While the server is not ready, its own reason stands.
    assert health_report("restarting", "a crash", layout, board).reason == "a crash"
    lines[1].state(State.READY)
    board.cells[1, 2] -= int(OTHERS_SILENCE_S * 1e9) + 1
    assert "front 1 has been silent" in health_report("ready", "", layout, board).reason


def test_health_leaves_out_a_front_that_is_alone(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    report = health_report("ready", "", layout, layout.board(create=True))
    assert report.ok
    assert [process["name"] for process in report.processes] == list(layout.processes[1:])
