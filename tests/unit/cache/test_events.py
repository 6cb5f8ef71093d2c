"""What subscribers hear. That it always adds up to the tree's content is part of test_radix_model.py."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.errors import StartupError
from scheduler_proc.cache.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventBus,
    ZmqPublisher,
    as_numbers,
    page_hashes,
)
from tests.unit.cache.trees import FULL, Logged, keys, window


def hashes(name: bytes, tokens: list[int], page_size: int) -> list[int]:
    return as_numbers(page_hashes(name, b"", keys(tokens).tobytes(), 8 * page_size))


def test_the_chain_depends_on_everything_before() -> None:
    assert hashes(b"n", [1, 2, 3, 4], 2)[0] == hashes(b"n", [1, 2, 9, 9], 2)[0]
    assert hashes(b"n", [1, 2, 3, 4], 2)[1] != hashes(b"n", [5, 2, 3, 4], 2)[1]
    assert hashes(b"n", [1, 2], 2) != hashes(b"m", [1, 2], 2)
    assert hashes(b"n", [1, 1], 1)[0] != hashes(b"n", [1, 1], 1)[1]


def test_stored_removed_cleared() -> None:
    heard: list[Event] = []
    bus = EventBus()
    bus.subscribe(heard.append)
    log = Logged([FULL, window(2)], 2, bus=bus)
    log.insert(range(4), [0, 1], [-1, 1], name=b"n")
    one, two = hashes(b"n", [0, 1, 2, 3], 2)
    three = hashes(b"n", [0, 1, 8, 9], 2)[1]
    assert heard == [
        BlockStored(b"n", [one], None, [0, 1], 2, 0, "device"),
        BlockStored(b"n", [two], one, [2, 3], 2, 0, "device"),
        BlockStored(b"n", [two], one, [2, 3], 2, 1, "device"),
    ]
    heard.clear()
    log.insert([0, 1, 8, 9], [0, 12], [10, 12], name=b"n")
    assert heard == [
        BlockStored(b"n", [one], None, [0, 1], 2, 1),
        BlockStored(b"n", [three], one, [8, 9], 2, 0),
        BlockStored(b"n", [three], one, [8, 9], 2, 1),
    ]
    heard.clear()
    log.match(range(4), name=b"n")
    log.evict(1, 1)
    log.evict(0, 1)
    assert heard == [BlockRemoved(b"n", [three], 1), BlockRemoved(b"n", [three], 0)]
    heard.clear()
    log.tree.flush()
    assert heard == [AllBlocksCleared()]


def test_splits_say_nothing_and_keep_the_hashes() -> None:
    heard: list[Event] = []
    bus = EventBus()
    bus.subscribe(heard.append)
    log = Logged(bus=bus)
    log.insert(range(4), range(4))
    heard.clear()
    log.match(range(2))
    assert heard == []
    log.evict(0, 1)
    assert heard == [BlockRemoved(b"", hashes(b"", [0, 1, 2, 3], 1)[2:], 0)]


def test_what_is_detached_is_told_at_once_and_only_then() -> None:
    heard: list[Event] = []
    bus = EventBus()
    bus.subscribe(heard.append)
    log = Logged([FULL, window(2)], bus=bus)
    log.insert(range(4), range(4), range(4))
    log.insert([0, 1, 8], [0, 1, 18], [0, 1, 18])
    lock = log.tree.lock(log.match([0, 1, 8]).node)
    one = hashes(b"", [0, 1, 2, 3], 1)
    heard.clear()
    log.tree.detach(log.match(range(4)).node)
    told = sorted((event.group, *event.block_hashes) for event in heard if isinstance(event, BlockRemoved))
    branch = hashes(b"", [0, 1, 8], 1)[2]
    assert told == sorted((group, *run) for group in (0, 1) for run in (one[:2], one[2:], [branch]))
    assert len(heard) == 6
    heard.clear()
    log.evict(1, 9)
    log.tree.flush()
    log.tree.unlock(lock)
    assert heard == []
    assert log.tree.num_nodes == 0


def test_nothing_is_computed_for_nobody() -> None:
    bus = EventBus()
    log = Logged(bus=bus)
    node = log.insert(range(4), range(4)).node
    assert node.hashes is None
    heard: list[Event] = []
    stop = bus.subscribe(heard.append)
    log.insert([0, 1, 2, 3, 4], range(5))
    assert isinstance(heard[0], BlockStored)
    assert heard[0].parent_hash == hashes(b"", [0, 1, 2, 3], 1)[-1]
    stop()
    log.insert([7], [7])
    assert len(heard) == 1


def test_a_failing_subscriber_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    heard: list[Event] = []
    bus = EventBus()
    bus.subscribe(fail)
    bus.subscribe(heard.append)
    with caplog.at_level(logging.ERROR):
        Logged(bus=bus).insert(range(2), range(2))
    assert len(heard) == 1
    assert "cache_subscriber_failed" in caplog.text


def test_published_batches_arrive_in_order(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    ctx = zmq.Context()
    publisher = ZmqPublisher(endpoint, "cache", ctx=ctx)
    subscriber = ctx.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.RCVTIMEO, 5000)
        subscriber.connect(endpoint)
        subscriber.subscribe(b"cache")
        # The first batches may go out before the subscription has come in.
        for _ in range(500):
            publisher(AllBlocksCleared())
            publisher.flush()
            if subscriber.poll(10):
                break
        last = int.from_bytes(subscriber.recv_multipart()[1], "big")
        while subscriber.poll(50):
            last = int.from_bytes(subscriber.recv_multipart()[1], "big")
        bus = EventBus()
        bus.subscribe(publisher)
        log = Logged(bus=bus)
        log.insert(range(2), range(2))
        log.evict(0, 2)
        publisher.flush()
        publisher.flush()  # nothing new: no message
        log.insert([5], [5])
        publisher.flush()
        batches = [subscriber.recv_multipart() for _ in range(2)]
        assert [int.from_bytes(frames[1], "big") for frames in batches] == [last + 1, last + 2]
        assert all(frames[0] == b"cache" and len(frames[1]) == 8 for frames in batches)
        decoder = msgspec.msgpack.Decoder(EventBatch)
        kinds = [[type(event) for event in decoder.decode(frames[2]).events] for frames in batches]
        assert kinds == [[BlockStored, BlockRemoved], [BlockStored]]
    finally:
        subscriber.close(0)
        publisher.close()
        ctx.term()


def test_a_slow_peer_never_blocks(tmp_path: Path) -> None:
    publisher = ZmqPublisher(f"ipc://{tmp_path}/events", "cache", max_batches=4)
    ctx = zmq.Context()
    subscriber = ctx.socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.RCVHWM, 1)
        subscriber.connect(f"ipc://{tmp_path}/events")
        subscriber.subscribe(b"")
        event = BlockStored(b"", list(range(1000)), None, list(range(1000)), 1, 0)
        for _ in range(500):
            publisher(event)
            publisher.flush()
    finally:
        subscriber.close(0)
        ctx.term()
        publisher.close()


def test_an_endpoint_in_use_ends_the_start(tmp_path: Path) -> None:
    publisher = ZmqPublisher("tcp://127.0.0.1:*", "cache")
    try:
        endpoint = publisher.socket.getsockopt(zmq.LAST_ENDPOINT)
        with pytest.raises(StartupError, match="cannot publish cache events"):
            ZmqPublisher(endpoint.rstrip(b"\0").decode(), "cache")
    finally:
        publisher.close()
