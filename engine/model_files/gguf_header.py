"""GgufHeader: the metadata and tensor list of a GGUF v2/v3 file, arrays decoded only when asked for.

Format: the public GGUF specification (little-endian; magic, version, counts, key-values, tensor infos, data).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.gguf_types import GGUF_TYPES, GgufType

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING = 8
_ARRAY = 9

_MIN_KEY_VALUE_BYTES = 8 + 4 + 1
_MIN_TENSOR_INFO_BYTES = 8 + 4 + 4 + 8
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 65_535
_MAX_HEADER_BYTES = 1 << 28
"""Ten times the largest vocabularies: a wrong length must not make metadata out of gigabytes of weights."""
_DEFAULT_ALIGNMENT = 32
_INTEGERS = frozenset({0, 1, 2, 3, 4, 5, 10, 11})

Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufArray:
    """Where an array's elements lie in the header, not yet decoded. `start` is a byte offset."""

    element_type: int
    count: int
    start: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` is row-major (the file's own order reversed); `offset` counts bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type: GgufType
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class GgufHeader:
    """A parsed header. The typed getters raise ModelFileError naming the file and the key."""

    path: str
    version: int
    metadata: dict[str, Scalar | GgufArray]
    tensors: dict[str, GgufTensor]
    raw: bytes
    """The file's bytes up to the end of the tensor list, which arrays are decoded from."""

    def has(self, key: str) -> bool:
        """Whether the metadata holds `key`."""
        return key in self.metadata

    def string(self, key: str, default: str | None = None) -> str:
        """A string value; `default` where the key is missing."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        """An integer value; `default` where the key is missing."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(key, "an integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number as float; `default` where the key is missing."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """A bool; `default` where the key is missing."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a bool", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """An integer value, or None where the key is missing."""
        return self.integer(key) if key in self.metadata else None

    def count(self, key: str) -> int:
        """The number of elements of an array, without decoding it."""
        return self._array(key).count

    def strings(self, key: str) -> list[str]:
        """The elements of an array of strings."""
        array = self._array(key)
        if array.element_type != _STRING:
            raise ModelFileError(f"{self.path}: {key} must be an array of strings")
        raw, unpack, pos = self.raw, _U64.unpack_from, array.start
        out: list[str] = []
        try:
            for _ in range(array.count):
                end = pos + 8 + unpack(raw, pos)[0]
                out.append(raw[pos + 8 : end].decode())
                pos = end
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path}: {key}[{len(out)}] is not UTF-8") from error
        return out

    def numbers(self, key: str) -> tuple[int | float, ...]:
        """The elements of an array of numbers."""
        array = self._array(key)
        if array.element_type == _STRING:
            raise ModelFileError(f"{self.path}: {key} must be an array of numbers")
        code = _SCALARS[array.element_type].format[1:]
        return struct.unpack_from(f"<{array.count}{code}", self.raw, array.start)

    def integers(self, key: str) -> tuple[int, ...]:
        """The elements of an array of integers."""
        array = self._array(key)
        if array.element_type not in _INTEGERS:
            raise ModelFileError(f"{self.path}: {key} must be an array of integers")
        return struct.unpack_from(f"<{array.count}{_SCALARS[array.element_type].format[1:]}", self.raw, array.start)

    def data(self, key: str) -> bytes:
        """The elements of an array of 8-bit numbers as bytes."""
        array = self._array(key)
        if array.element_type not in (0, 1):
            raise ModelFileError(f"{self.path}: {key} must be an array of bytes")
        return self.raw[array.start : array.start + array.count]

    def _get(self, key: str, default: Scalar | None) -> Scalar | GgufArray:
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelFileError(f"{self.path}: the GGUF metadata lacks {key}")
        return value

    def _array(self, key: str) -> GgufArray:
        value = self._get(key, None)
        if not isinstance(value, GgufArray):
            raise self._wrong(key, "an array", value)
        return value

    def _wrong(self, key: str, expected: str, value: object) -> ModelFileError:
        shown = "an array" if isinstance(value, GgufArray) else repr(value)[:80]
        return ModelFileError(f"{self.path}: {key} must be {expected}, not {shown}")


def read_gguf_header(path: str | Path) -> GgufHeader:
    """Parse the header of a GGUF file. Raises ModelFileError for anything that is not a whole, sane GGUF file."""
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            if magic != b"GGUF":
                raise ModelFileError(f"{path}: not a GGUF file (it starts with {magic!r}, not b'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(str(path), data).read()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over the mapped file that checks every length against what is left before using it."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.end = min(self.size, _MAX_HEADER_BYTES)
        """Where the header must have ended."""
        self.pos = 4

    def read(self) -> GgufHeader:
        version = self.u32("the version")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "a big-endian file" if swapped in (2, 3) else f"version {version}"
            raise ModelFileError(f"{self.path}: GGUF versions 2 and 3 (little-endian) are read, this is {hint}")
        num_tensors = self.u64("the tensor count")
        num_keys = self.u64("the key count")
        self.check_count(num_tensors, _MIN_TENSOR_INFO_BYTES, "tensors")
        self.check_count(num_keys, _MIN_KEY_VALUE_BYTES, "metadata keys")

        metadata: dict[str, Scalar | GgufArray] = {}
        for _ in range(num_keys):
            key = self.name("a metadata key")
            if key in metadata:
                raise ModelFileError(f"{self.path}: corrupt: the metadata key {key} is there twice")
            metadata[key] = self.value(key)
        infos = [self.tensor_info() for _ in range(num_tensors)]

        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if (
            isinstance(alignment, bool)
            or not isinstance(alignment, int)
            or alignment <= 0
            or alignment & (alignment - 1)
        ):
            raise ModelFileError(f"{self.path}: general.alignment must be a power of two, not {alignment!r}")
        data_start = -(-self.pos // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, type_id, offset in infos:
            if name in tensors:
                raise ModelFileError(f"{self.path}: corrupt: the tensor {name} is there twice")
            tensors[name] = self.tensor(name, shape, type_id, data_start + offset)
        return GgufHeader(self.path, version, metadata, tensors, self.data[: self.pos])

    def value(self, key: str) -> Scalar | GgufArray:
        kind = self.u32(f"the type of {key}")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise ModelFileError(f"{self.path}: {key} has the unknown value type {kind}")
        return scalar.unpack_from(self.data, self.take(scalar.size, key))[0]

    def array(self, key: str) -> GgufArray:
        kind = self.u32(f"the element type of {key}")
        count = self.u64(f"the length of {key}")
        if kind == _STRING:
            self.check_count(count, 8, f"elements of {key}")
            start = self.pos
            self.skip_strings(count, key)
            return GgufArray(kind, count, start)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise ModelFileError(f"{self.path}: {key} is an array of the unknown or nested type {kind}")
        self.check_count(count, scalar.size, f"elements of {key}")
        return GgufArray(kind, count, self.take(count * scalar.size, key))

    def skip_strings(self, count: int, key: str) -> None:
        # The hot loop of the whole parse (one turn per vocabulary entry): no method call inside.
        data, unpack, pos, limit = self.data, _U64.unpack_from, self.pos, self.end - 8
        for _ in range(count):
            if pos > limit:
                raise self.truncated(key)
            pos += 8 + unpack(data, pos)[0]
        if pos > self.end:
            raise self.truncated(key)
        self.pos = pos

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.name("a tensor name")
        num_dims = self.u32(f"the rank of {name}")
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            raise ModelFileError(
                f"{self.path}: tensor {name} has {num_dims} dimensions, 1 to {_MAX_DIMENSIONS} are read"
            )
        dims = struct.unpack_from(f"<{num_dims}Q", self.data, self.take(8 * num_dims, name))
        return name, dims[::-1], self.u32(f"the type of {name}"), self.u64(f"the offset of {name}")

    def tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> GgufTensor:
        kind = GGUF_TYPES.get(type_id)
        if kind is None:
            raise ModelFileError(f"{self.path}: tensor {name} has the unknown element type {type_id}")
        if not all(shape):
            raise ModelFileError(f"{self.path}: tensor {name} is empty: its shape is {shape}")
        if shape[-1] % kind.block_elements:
            raise ModelFileError(
                f"{self.path}: rows of tensor {name} have {shape[-1]} elements, "
                f"which {kind.name} blocks of {kind.block_elements} do not divide"
            )
        num_elements = 1
        for extent in shape:
            num_elements *= extent
        size_bytes = num_elements // kind.block_elements * kind.block_bytes
        if offset + size_bytes > self.size:
            raise ModelFileError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + size_bytes}, the file has {self.size}"
            )
        return GgufTensor(name, shape, kind, offset, size_bytes)

    def take(self, size_bytes: int, what: str) -> int:
        start = self.pos
        if size_bytes > self.end - start:
            raise self.truncated(what)
        self.pos = start + size_bytes
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.take(8, what))[0]

    def string(self, what: str) -> str:
        length = self.u64(what)
        start = self.take(length, what)
        try:
            return self.data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise ModelFileError(f"{self.path}: {what} is not UTF-8") from error

    def name(self, what: str) -> str:
        """A string that error messages can quote."""
        name = self.string(what)
        if not name.isprintable() or len(name) > _MAX_NAME_BYTES:
            raise ModelFileError(f"{self.path}: corrupt: {what} is {name[:80]!r}")
        return name

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        if count * min_bytes > self.end - self.pos:
            raise ModelFileError(f"{self.path}: corrupt: {count} {what} do not fit in {self.size} bytes")

    def truncated(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: truncated or corrupt: the file ends inside {what}")
