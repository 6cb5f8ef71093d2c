"""Typed ZeroMQ ends: every process binds one Puller; its peers connect a Pusher to it.

No high-water mark and no linger: a send never blocks the loop; what is unsent is bounded by the running requests.
The first message on every connection is Hello; a peer with another schema or config is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

from engine.errors import StartupError
from engine.ipc.messages import Hello

T = TypeVar("T")
log = logging.getLogger(__name__)


def context() -> zmq.Context[zmq.Socket[bytes]]:
    """A ZeroMQ context for one process."""
    return zmq.Context(io_threads=1)


class Puller(Generic[T]):
    """The receiving end of one process; checks Hello itself. `kind` is the union it takes, a typing form."""

    def __init__(self, ctx: zmq.Context, address: str, kind: Any, hello: Hello) -> None:
        self.socket = ctx.socket(zmq.PULL)
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise StartupError(f"cannot bind {address}: {error}") from error
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._hello = hello

    @property
    def fd(self) -> int:
        """File descriptor that turns readable when messages may wait (edge-triggered: drain until empty)."""
        return self.socket.getsockopt(zmq.FD)

    def wait(self, timeout_s: float) -> bool:
        """Block until a message waits or the time is over."""
        return bool(self.socket.poll(int(timeout_s * 1000)))

    def drain(self, limit: int = 4096) -> Iterator[T]:
        """Yield the waiting messages, at most `limit`, without blocking.

        Raises StartupError when a peer was built or configured otherwise.
        """
        for _ in range(limit):
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                log.error("event=bad_message bytes=%d error=%s", len(data), error)
                continue
            if isinstance(message, Hello):
                self._check(message)
            else:
                yield message

    def _check(self, peer: Hello) -> None:
        if peer.schema_hash != self._hello.schema_hash:
            raise StartupError(
                f"{peer.sender} and {self._hello.sender} run different versions of the message schema "
                f"({peer.schema_hash}, {self._hello.schema_hash}); install one version everywhere."
            )
        if peer.config_hash != self._hello.config_hash:
            raise StartupError(
                f"{peer.sender} and {self._hello.sender} were started with different configurations "
                f"({peer.config_hash}, {self._hello.config_hash})."
            )

    def close(self) -> None:
        self.socket.close(0)


class Pusher:
    """The sending end towards one peer; says Hello first."""

    def __init__(self, ctx: zmq.Context, address: str, hello: Hello) -> None:
        self.socket = ctx.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self.send(hello)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; never blocks."""
        self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close(0)
