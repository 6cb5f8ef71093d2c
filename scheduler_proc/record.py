"""Recording a scheduler: every message it took in, every plan it made and every result it saw, without text.

The file is a sequence of frames, each a little-endian uint32 length and a msgpack-encoded entry. It begins with a
Header. A Turn opens each turn of the loop, those in which nothing was launched or collected too: they may have ended a
pin or retracted a request. What follows belongs to it, in order. Labels and stop strings are left out (a stop string
becomes a mark that there was one), and salts are replaced by names that are equal where they are; token ids are not
text and stay. Logprobs are left out: no plan depends on them. Only the file's owner may read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFileError
from engine.ipc.messages import PinTokens, TokenizedRequest, ToScheduler
from engine.model_files.types import ModelFiles
from scheduler_proc.plan import Device, Handle, StepPlan, StepResult

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, tag="header", array_like=True):
    """What the scheduler was built with."""

    config: EngineConfig
    model: ModelFiles
    num_tokens: int
    """Tokens of the KV pool."""


class Turn(msgspec.Struct, tag="turn", array_like=True):
    """One turn of the loop begins; CLOCK_MONOTONIC seconds, the time for all that happens in it."""

    time_s: float


class Received(msgspec.Struct, tag="received", array_like=True):
    """A message came in."""

    message: ToScheduler


class Planned(msgspec.Struct, tag="planned", array_like=True):
    """A plan was launched, as `encode_plan` bytes."""

    plan: bytes


class Refused(msgspec.Struct, tag="refused", array_like=True):
    """The plan before it could not be launched; the class of the exception."""

    error: str


class Resulted(msgspec.Struct, tag="resulted", array_like=True):
    """A step's tokens int32 [rows, 1 + drafts], NaN rows as uint8 [rows] (empty = none), or the class of its exception.
    Where tokens were drafted, how many of a row's tokens are valid, and how many were drafted: int32 [rows] each."""

    tokens: bytes
    failed: bytes
    error: str | None = None
    counts: bytes = b""
    drafted: bytes = b""


class End(msgspec.Struct, tag="end", array_like=True):
    """The scheduler stopped in order; without it the last turn may be cut off."""


Entry: TypeAlias = Header | Turn | Received | Planned | Refused | Resulted | End


class Drainable(Protocol):
    """An inbox."""

    def drain(self, limit: int = 4096) -> Iterable[ToScheduler]: ...

    def wait(self, timeout_s: float) -> bool: ...


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as bytes: equal plans give equal bytes."""
    return msgspec.msgpack.encode(plan, enc_hook=_array)


def _array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.shape, value.tobytes()]
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot record {type(value)}")


class TurnClock:
    """Seconds that stand still within a turn: what a turn does by the clock can be done again."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()

    def __call__(self) -> float:
        return self.now_s


class Recorder:
    """Writes a record; buffered, flushed once a second and at the end. When that fails, it ends and says so once.

    Moves `clock` on at the beginning of each turn. Raises ConfigError if the file cannot be made.
    """

    def __init__(self, path: Path, header: Header, clock: TurnClock) -> None:
        try:
            self._file: BinaryIO | None = _open_private(path)
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from error
        self.without_text = WithoutText()
        self._path = path
        self._clock = clock
        self._encoder = msgspec.msgpack.Encoder()
        self._flushed = time.monotonic()
        self._write(msgspec.structs.replace(header, config=header.config.without_secrets()))

    def begin_turn(self) -> None:
        """A turn has begun."""
        now = self._clock.now_s = time.monotonic()
        self._write(Turn(now))
        if now - self._flushed > 1.0 and self._file is not None:
            self._flushed = now
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def add(self, entry: Received | Planned | Refused | Resulted) -> None:
        self._write(entry)

    def close(self) -> None:
        self._write(End())
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _write(self, entry: Entry) -> None:
        if self._file is None:
            return
        data = self._encoder.encode(entry)
        try:
            self._file.write(_LENGTH.pack(len(data)))
            self._file.write(data)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Serving goes on without a record."""
        log.error("event=record_ended file=%s reason=%s", self._path, error.strerror)
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def _open_private(path: Path) -> BinaryIO:
    """An empty file that nobody but its owner may read, whoever might read what was there before."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "wb")


def read_record(path: Path) -> Iterator[Entry]:
    """The entries of a record; a last frame that was cut off is left out. Raises ModelFileError if it is none."""
    decoder = msgspec.msgpack.Decoder(Entry)
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            data = file.read(length)
            if len(data) < length:
                return
            try:
                yield decoder.decode(data)
            except msgspec.MsgspecError as error:
                raise ModelFileError(f"{path} is not a record of this version: {error}") from error


class WithoutText:
    """Takes what people wrote out of messages.

    Salts that are equal stay equal, under names that nobody can find out by trying salts: the key is kept nowhere.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def __call__(self, message: ToScheduler) -> ToScheduler:
        if isinstance(message, PinTokens):
            return msgspec.structs.replace(message, cache_salt=self._name(message.cache_salt))
        if not isinstance(message, TokenizedRequest):
            return message
        sampling = msgspec.structs.replace(message.sampling, stop=("?",) * len(message.sampling.stop))
        return msgspec.structs.replace(message, label="", sampling=sampling, cache_salt=self._name(message.cache_salt))

    def _name(self, salt: str | None) -> str | None:
        if salt is None:
            return None
        # A salt comes from JSON, which can spell half of a surrogate pair.
        return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), key=self._key, digest_size=16).hexdigest()


class RecordingInbox:
    """An inbox whose messages are recorded."""

    def __init__(self, inbox: Drainable, recorder: Recorder) -> None:
        self._inbox = inbox
        self._recorder = recorder

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        self._recorder.begin_turn()
        for message in self._inbox.drain(limit):
            self._recorder.add(Received(self._recorder.without_text(message)))
            yield message

    def wait(self, timeout_s: float) -> bool:
        return self._inbox.wait(timeout_s)


class RecordingDevice:
    """A device whose plans and results are recorded."""

    def __init__(self, device: Device, recorder: Recorder) -> None:
        self._device = device
        self._recorder = recorder

    def launch(self, plan: StepPlan) -> Handle:
        self._recorder.add(Planned(encode_plan(plan)))
        try:
            return self._device.launch(plan)
        except Exception as error:
            self._recorder.add(Refused(type(error).__name__))
            raise

    def collect(self, handle: Handle) -> StepResult:
        try:
            result = self._device.collect(handle)
        except Exception as error:
            self._recorder.add(Resulted(b"", b"", type(error).__name__))
            raise
        failed = b"" if result.failed is None else result.failed.tobytes()
        counts, drafted = (b"" if part is None else part.tobytes() for part in (result.counts, result.drafted))
        self._recorder.add(Resulted(np.ascontiguousarray(result.tokens).tobytes(), failed, None, counts, drafted))
        return result

    def pages_freed(self, pages: np.ndarray) -> None:
        self._device.pages_freed(pages)

    def close(self) -> None:
        self._device.close()
        self._recorder.close()
