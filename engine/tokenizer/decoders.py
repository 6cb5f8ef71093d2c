"""The decoder part of a tokenizer.json -> how a vocabulary entry becomes bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.errors import ModelFileError
from engine.tokenizer.byte_level import byte_level_bytes

SUPPORTED = "ByteLevel, Metaspace, or a Sequence of Replace, ByteFallback, Fuse, Strip, Metaspace, ByteLevel"

_BYTE_ENTRY = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True)
class EntryDecoder:
    """Turns vocabulary entries into bytes."""

    byte_level: bool = False
    byte_fallback: bool = False
    """`<0xNN>` is that byte."""
    replacements: list[tuple[str, str]] = field(default_factory=list)
    strips_leading_space: bool = False

    def __call__(self, entries: list[str]) -> list[bytes]:
        if self.byte_level:
            return byte_level_bytes(entries)
        return [self._entry_bytes(entry) for entry in entries]

    def _entry_bytes(self, entry: str) -> bytes:
        if self.byte_fallback and (match := _BYTE_ENTRY.fullmatch(entry)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            entry = entry.replace(old, new)
        return entry.encode()


def parse_decoder(decoder: object, file: str) -> EntryDecoder:
    """Read the `decoder` object of a tokenizer.json. Raises ModelFileError for kinds that are not supported."""
    parsed = EntryDecoder()
    for part in _parts(decoder, file):
        _READERS.get(str(part.get("type")), _unsupported)(part, parsed, file)
    return parsed


def _parts(decoder: object, file: str) -> list[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        raise ModelFileError(f"{file}: no decoder is given; supported are {SUPPORTED}")
    if decoder.get("type") != "Sequence":
        return [decoder]
    parts = decoder.get("decoders")
    if not isinstance(parts, list):
        raise ModelFileError(f"{file}: the Sequence decoder lacks its list of decoders")
    return [inner for part in parts for inner in _parts(part, file)]


def _byte_level(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    parsed.byte_level = True


def _byte_fallback(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    parsed.byte_fallback = True


def _fuse(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    """Joining the pieces is what concatenating bytes does anyway."""


def _replace(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    pattern = part.get("pattern")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    new = part.get("content")
    if not isinstance(old, str) or not isinstance(new, str):
        raise ModelFileError(f"{file}: the decoder's Replace must have a String pattern and a content")
    parsed.replacements.append((old, new))


def _metaspace(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    parsed.replacements.append((str(part.get("replacement", "▁")), " "))
    scheme = part.get("prepend_scheme", "always" if part.get("add_prefix_space", True) else "never")
    parsed.strips_leading_space = scheme != "never"


def _strip(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    if part.get("content") != " " or part.get("stop") not in (0, None):
        raise ModelFileError(f"{file}: the decoder's Strip may only strip leading spaces")
    parsed.strips_leading_space = bool(part.get("start"))


def _unsupported(part: Mapping[str, object], parsed: EntryDecoder, file: str) -> None:
    raise ModelFileError(f"{file}: the decoder {part.get('type')!r} is not supported; supported are {SUPPORTED}")


_READERS: dict[str, Callable[[Mapping[str, object], EntryDecoder, str], None]] = {
    "ByteLevel": _byte_level,
    "ByteFallback": _byte_fallback,
    "Fuse": _fuse,
    "Replace": _replace,
    "Metaspace": _metaspace,
    "Strip": _strip,
}
