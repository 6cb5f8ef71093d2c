"""What the prefix cache stores and drops, told to whoever subscribes (routers, tests), in process or over ZeroMQ."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable

import msgspec
import numpy as np
import zmq

from engine.errors import StartupError
from engine.ipc.sockets import context
from scheduler_proc.cache.groups import Node, Root

log = logging.getLogger(__name__)

HASH_BYTES = 8


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Consecutive pages of one group are cached now. `keys` is flat; `parent_hash` is the page before, None = none."""

    namespace: bytes
    block_hashes: list[int]
    parent_hash: int | None
    keys: list[int]
    page_size: int
    group: int
    medium: str = "device"


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """These pages of one group are no longer cached."""

    namespace: bytes
    block_hashes: list[int]
    group: int


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing is cached in any namespace or group."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one step did, in order. `time_s` is seconds since the epoch."""

    time_s: float
    events: list[Event]


def page_hashes(namespace: bytes, parent: bytes, keys: bytes, page_bytes: int) -> bytes:
    """Chained blake2b-64 of each page: over the namespace, the hash of the page before (b"" = none) and its keys.

    Returns 8 bytes a page; as numbers they are big-endian.
    """
    seed = hashlib.blake2b(len(namespace).to_bytes(8, "big") + namespace, digest_size=HASH_BYTES)
    hashes = []
    for offset in range(0, len(keys), page_bytes):
        digest = seed.copy()
        digest.update(parent + keys[offset : offset + page_bytes])
        parent = digest.digest()
        hashes.append(parent)
    return b"".join(hashes)


def as_numbers(hashes: bytes) -> list[int]:
    """The hashes of consecutive pages as unsigned 64-bit numbers."""
    return np.frombuffer(hashes, ">u8").tolist()


class EventBus:
    """Hands each event to every subscriber, in order."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[Event], None]] = []

    @property
    def active(self) -> bool:
        """Somebody listens."""
        return bool(self._callbacks)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """`callback` hears of every event from now on, until the returned function is called."""
        self._callbacks.append(callback)
        return lambda: self._callbacks.remove(callback)

    def publish(self, event: Event) -> None:
        for callback in tuple(self._callbacks):
            try:
                callback(event)
            except Exception:  # a subscriber's fault must not stop the tree half-way through a change
                log.exception("event=cache_subscriber_failed kind=%s", type(event).__name__)


class TreeEvents:
    """Turns changes of a tree into events; computes and keeps page hashes only while somebody listens."""

    def __init__(self, bus: EventBus | None, page_size: int, page_bytes: int) -> None:
        self._bus = bus if bus is not None else EventBus()
        self._page_size = page_size
        self._page_bytes = page_bytes

    @property
    def active(self) -> bool:
        return self._bus.active

    def stored(self, node: Node, group: int) -> None:
        """`node`, linked into the tree, got pages of `group`."""
        namespace, parent, hashes = self._hashes(node)
        self._bus.publish(
            BlockStored(
                namespace,
                as_numbers(hashes),
                int.from_bytes(parent, "big") if parent else None,
                np.frombuffer(node.keys, np.int64).tolist(),
                self._page_size,
                group,
            )
        )

    def removed(self, node: Node, group: int) -> None:
        """`node`, still linked, loses its pages of `group`."""
        namespace, _, hashes = self._hashes(node)
        self._bus.publish(BlockRemoved(namespace, as_numbers(hashes), group))

    def cleared(self) -> None:
        self._bus.publish(AllBlocksCleared())

    def _hashes(self, node: Node) -> tuple[bytes, bytes, bytes]:
        """Namespace, hash of the page before the node (b"" = none), hashes of its pages."""
        path = [node]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        root = path.pop()
        assert isinstance(root, Root), "prefix tree: an event for a node that is no longer there"
        before = hashes = b""
        for step in reversed(path):
            before = hashes[-HASH_BYTES:]
            if step.hashes is None:
                step.hashes = page_hashes(root.namespace, before, step.keys, self._page_bytes)
            hashes = step.hashes
        return root.namespace, before, hashes


class ZmqPublisher:
    """A subscriber that publishes one message a step: frames topic, sequence (8 bytes, big-endian), msgpack EventBatch.

    Never blocks: a peer that is `max_batches` behind loses batches, which it sees as a gap in the sequence.
    Raises StartupError when the endpoint cannot be bound.
    """

    def __init__(
        self, endpoint: str, topic: str, *, ctx: zmq.Context[zmq.Socket[bytes]] | None = None, max_batches: int = 10_000
    ) -> None:
        self._own_ctx = None
        if ctx is None:
            ctx = self._own_ctx = context()
        self.socket = ctx.socket(zmq.PUB)
        self.socket.setsockopt(zmq.SNDHWM, max_batches)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise StartupError(f"cannot publish cache events at {endpoint}: {error}") from error
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._events: list[Event] = []
        self._sequence = 0

    def __call__(self, event: Event) -> None:
        self._events.append(event)

    def flush(self) -> None:
        """Send what happened since the last call; nothing when nothing happened."""
        if not self._events:
            return
        batch = self._encoder.encode(EventBatch(time.time(), self._events))
        self._events = []
        frames = [self._topic, self._sequence.to_bytes(8, "big"), batch]
        self._sequence += 1
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart(frames, zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(0)
        if self._own_ctx is not None:
            self._own_ctx.term()
