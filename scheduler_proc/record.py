"""Recording a scheduler: every message it took in, every plan it made and every result it saw, without text.

The file is a sequence of frames, each a little-endian uint32 length and a msgpack-encoded entry. It begins with a
Header. A Turn opens each turn of the loop in which anything happened; what follows belongs to it, in order. Labels and
stop strings are left out (a stop string becomes a mark that there was one); token ids are not text and stay.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

import msgspec
import numpy as np

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelFileError
from engine.ipc.messages import TokenizedRequest, ToScheduler
from engine.model_files.types import ModelFiles
from scheduler_proc.plan import Device, Handle, StepPlan, StepResult

_LENGTH = struct.Struct("<I")


class Header(msgspec.Struct, tag="header", array_like=True):
    """What the scheduler was built with."""

    config: EngineConfig
    model: ModelFiles
    num_tokens: int
    """Tokens of the KV pool."""


class Turn(msgspec.Struct, tag="turn", array_like=True):
    """One turn of the loop begins; CLOCK_MONOTONIC seconds."""

    time_s: float


class Received(msgspec.Struct, tag="received", array_like=True):
    """A message came in."""

    message: ToScheduler


class Planned(msgspec.Struct, tag="planned", array_like=True):
    """A plan was launched, as `encode_plan` bytes."""

    plan: bytes


class Resulted(msgspec.Struct, tag="resulted", array_like=True):
    """A step's tokens int32 [rows], NaN rows as uint8 [rows] (empty = none), or the text of its exception."""

    tokens: bytes
    failed: bytes
    error: str | None = None


class End(msgspec.Struct, tag="end", array_like=True):
    """The scheduler stopped in order; without it the last turn may be cut off."""


Entry: TypeAlias = Header | Turn | Received | Planned | Resulted | End


class Drainable(Protocol):
    """An inbox."""

    def drain(self, limit: int = 4096) -> Iterable[ToScheduler]: ...

    def wait(self, timeout_s: float) -> bool: ...


def encode_plan(plan: StepPlan) -> bytes:
    """A plan as bytes: equal plans give equal bytes."""
    return msgspec.msgpack.encode(plan, enc_hook=_array)


def _array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    raise TypeError(f"cannot record {type(value)}")


class Recorder:
    """Writes a record; buffered, flushed once a second and at the end."""

    def __init__(self, path: Path, header: Header) -> None:
        try:
            self._file: BinaryIO = path.open("wb")
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from error
        self._encoder = msgspec.msgpack.Encoder()
        self._turn_open = False
        self._flushed = time.monotonic()
        self._write(header)

    def begin_turn(self) -> None:
        """A turn has begun; it is written once something happens in it."""
        self._turn_open = False
        if time.monotonic() - self._flushed > 1.0:
            self._file.flush()
            self._flushed = time.monotonic()

    def add(self, entry: Received | Planned | Resulted) -> None:
        if not self._turn_open:
            self._turn_open = True
            self._write(Turn(time.monotonic()))
        self._write(entry)

    def close(self) -> None:
        self._write(End())
        self._file.close()

    def _write(self, entry: Entry) -> None:
        data = self._encoder.encode(entry)
        self._file.write(_LENGTH.pack(len(data)))
        self._file.write(data)


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


def without_text(message: ToScheduler) -> ToScheduler:
    """The message with nothing a person wrote in it."""
    if not isinstance(message, TokenizedRequest):
        return message
    sampling = msgspec.structs.replace(message.sampling, stop=("?",) * len(message.sampling.stop))
    return msgspec.structs.replace(message, label="", sampling=sampling)


class RecordingInbox:
    """An inbox whose messages are recorded."""

    def __init__(self, inbox: Drainable, recorder: Recorder) -> None:
        self._inbox = inbox
        self._recorder = recorder

    def drain(self, limit: int = 4096) -> Iterator[ToScheduler]:
        self._recorder.begin_turn()
        for message in self._inbox.drain(limit):
            self._recorder.add(Received(without_text(message)))
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
        return self._device.launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        try:
            result = self._device.collect(handle)
        except Exception as error:
            self._recorder.add(Resulted(b"", b"", str(error)))
            raise
        failed = b"" if result.failed is None else result.failed.tobytes()
        self._recorder.add(Resulted(np.ascontiguousarray(result.tokens[:, 0]).tobytes(), failed))
        return result

    def pages_freed(self, pages: np.ndarray) -> None:
        self._device.pages_freed(pages)

    def close(self) -> None:
        self._device.close()
        self._recorder.close()
