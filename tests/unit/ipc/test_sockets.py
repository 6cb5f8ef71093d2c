"""Sockets, board and child config: typed ends, handshakes, heartbeats."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from engine.config import EngineConfig, HttpOptions, config_hash
from engine.errors import StartupError
from engine.ipc.board import Board, Heartbeat, State
from engine.ipc.child import Layout
from engine.ipc.messages import Abort, Hello, ToScheduler, schema_hash
from engine.ipc.sockets import Puller, Pusher, context


@pytest.fixture
def ctx() -> Iterator[zmq.Context]:
    made = context()
    yield made
    made.destroy(linger=0)


def hello(sender: str, schema: str = "s", config: str = "c") -> Hello:
    return Hello(sender, schema, config)


def receive(puller: Puller, count: int) -> list:
    got: list = []
    deadline = time.monotonic() + 5
    while len(got) < count and time.monotonic() < deadline:
        puller.wait(0.1)
        got.extend(puller.drain())
    return got


def test_messages_arrive_typed_and_in_order(ctx: zmq.Context, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/a"
    puller: Puller = Puller(ctx, address, ToScheduler, hello("b"))
    pusher = Pusher(ctx, address, hello("a"))
    for number in range(50):
        pusher.send(Abort(number, 0))
    assert receive(puller, 50) == [Abort(number, 0) for number in range(50)]


@pytest.mark.parametrize("other", [hello("a", schema="other"), hello("a", config="other")])
def test_a_peer_of_another_start_is_refused_in_one_sentence(ctx: zmq.Context, tmp_path: Path, other: Hello) -> None:
    address = f"ipc://{tmp_path}/a"
    puller: Puller = Puller(ctx, address, ToScheduler, hello("b"))
    pusher = Pusher(ctx, address, other)
    with pytest.raises(StartupError, match="a and b"):
        receive(puller, 1)
    pusher.close()


def test_a_send_never_blocks_without_a_receiver(ctx: zmq.Context, tmp_path: Path) -> None:
    pusher = Pusher(ctx, f"ipc://{tmp_path}/nobody", hello("a"))
    for number in range(5000):
        pusher.send(Abort(number, 0))


def test_garbage_is_logged_and_skipped(ctx: zmq.Context, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    address = f"ipc://{tmp_path}/a"
    puller: Puller = Puller(ctx, address, ToScheduler, hello("b"))
    pusher = Pusher(ctx, address, hello("a"))
    pusher.socket.send(b"\xff\x00garbage")
    pusher.send(Abort(1, 0))
    assert receive(puller, 1) == [Abort(1, 0)]
    assert "bad_message" in caplog.text


def test_the_schema_hash_is_the_same_in_every_process() -> None:
    code = "from engine.ipc.messages import schema_hash; print(schema_hash())"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert output.stdout.strip() == schema_hash()


def test_the_config_hash_follows_every_option() -> None:
    assert config_hash(EngineConfig()) == config_hash(EngineConfig())
    assert config_hash(EngineConfig()) != config_hash(EngineConfig(http=HttpOptions(port=1)))


def test_a_heartbeat_is_seen_through_another_mapping(tmp_path: Path) -> None:
    written = Board(tmp_path / "board", 3, create=True)
    beat = Heartbeat(written, 1)
    read = Board(tmp_path / "board", 3)
    beat.state(State.READY)
    beat.beat(41, 3)
    line = read.read(1)
    assert (line.pid, line.state, line.step, line.work) == (os.getpid(), State.READY, 41, 3)
    assert line.age_s < 5


def test_layout_names_and_addresses_are_distinct() -> None:
    layout = Layout("/run/x", num_fronts=2, num_tokenizers=3)
    assert len(layout.processes) == 7
    assert len({layout.address(name) for name in layout.processes}) == 7


def test_a_request_and_its_abort_take_one_way() -> None:
    layout = Layout("/run/x", num_tokenizers=3, num_schedulers=2)
    names = set(layout.processes)
    for number in range(50):
        assert layout.tokenizer_of(number) in names
        assert layout.route(number) in names
    assert len({layout.route(number) for number in range(50)}) == 2
