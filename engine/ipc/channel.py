"""Messages both ways over one end of a stream socket pair, in order. Either end hears when the other is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from engine.errors import UnavailableError
from engine.ipc.control import Answer

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0
_HEADER_BYTES = 4


class Channel(asyncio.Protocol, Generic[T]):
    """One end. A message is its length (4 bytes, big endian) and msgpack; sends never block, they are buffered."""

    def __init__(self, kind: Any, receive: Callable[[T], None], lost: Callable[[], None]) -> None:
        """`kind`: the union that `receive` takes, a typing form; `lost` is called once when the peer is gone."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()
        self._receive = receive
        self._lost = lost
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._counter = 0

    async def connect(self, end: socket.socket) -> None:
        """Take over this end of the pair; one that is cancelled closes it."""
        end.setblocking(False)
        connecting = asyncio.ensure_future(asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end))
        try:
            # Cancelled half-way, the event loop and the socket object would both close the descriptor.
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._abort)
            raise

    def _abort(self, connecting: asyncio.Future[Any]) -> None:
        if self._transport is not None:
            self._transport.abort()

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; into nothing if the peer is gone or this end is closed."""
        if self._transport is not None and self._is_open:
            data = self._encoder.encode(message)
            self._transport.write(len(data).to_bytes(_HEADER_BYTES, "big") + data)

    async def call(self, message: Callable[[int], msgspec.Struct], timeout_s: float = CALL_TIMEOUT_S) -> Answer:
        """Send a call with a number of its own and wait for its answer. Raises UnavailableError if none comes."""
        if not self._is_open:
            raise _no_answer()
        self._counter += 1
        number = self._counter
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self.send(message(number))
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise _no_answer() from None
        finally:
            self._calls.pop(number, None)

    def close(self) -> None:
        """Close this end once what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    # -- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _HEADER_BYTES:
            end = _HEADER_BYTES + int.from_bytes(self._buffer[:_HEADER_BYTES], "big")
            if len(self._buffer) < end:
                return
            message = self._decoder.decode(bytes(self._buffer[_HEADER_BYTES:end]))
            del self._buffer[:end]
            if isinstance(message, Answer):
                self._settle(message)
            else:
                self._receive(message)

    def _settle(self, answer: Answer) -> None:
        future = self._calls.get(answer.call)
        if future is not None and not future.done():
            future.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in self._calls.values():
            if not future.done():
                future.set_exception(_no_answer())
        self._lost()


def _no_answer() -> UnavailableError:
    return UnavailableError("Another process of this server did not answer in time.", retry_after_s=5)
