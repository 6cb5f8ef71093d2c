"""Write a sentencepiece ModelProto from pieces, scores and types (protobuf wire format, public field numbers)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Piece types; GGUF's tokenizer.ggml.token_type uses the same numbers."""

_BPE = 2
_VARINT, _BYTES, _FLOAT32 = 0, 2, 5


@dataclass(frozen=True, slots=True)
class SentencePieceSpec:
    """The contents of a model file; the three sequences have one entry per id."""

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unk_id: int
    bos_id: int | None
    eos_id: int | None
    add_dummy_prefix: bool
    remove_extra_whitespaces: bool
    precompiled_charsmap: bytes = b""


def model_proto(spec: SentencePieceSpec) -> bytes:
    """The serialised ModelProto of a BPE model with byte fallback (where the pieces hold bytes)."""
    out = bytearray()
    for piece, score, kind in zip(spec.pieces, spec.scores, spec.types, strict=True):
        entry = _bytes(1, piece.encode()) + _float(2, score) + _integer(3, kind)
        out += _bytes(1, entry)
    out += _bytes(2, _trainer_spec(spec))
    out += _bytes(3, _normalizer_spec(spec))
    return bytes(out)


def _trainer_spec(spec: SentencePieceSpec) -> bytes:
    out = _integer(3, _BPE) + _integer(4, len(spec.pieces)) + _integer(35, int(BYTE in spec.types))
    for id_field, text_field, id in ((40, 45, spec.unk_id), (41, 46, spec.bos_id), (42, 47, spec.eos_id)):
        out += _integer(id_field, -1 if id is None else id)
        if id is not None:
            out += _bytes(text_field, spec.pieces[id].encode())
    return out + _integer(43, -1)


def _normalizer_spec(spec: SentencePieceSpec) -> bytes:
    return (
        _bytes(1, b"identity")
        + _bytes(2, spec.precompiled_charsmap)
        + _integer(3, int(spec.add_dummy_prefix))
        + _integer(4, int(spec.remove_extra_whitespaces))
        + _integer(5, 1)
    )


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FLOAT32) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value
