"""Small GGUF files for tests, written by the reference library, or byte by byte where they are to be wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

LLAMA_KEYS: dict[str, int | float | str | bool] = {
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}

Value = int | float | str | bool | Sequence[str] | Sequence[int] | Sequence[float]


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    keys: Mapping[str, Value] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a GGUF v3 file; ints become u32, floats f32. `llama.` in default keys becomes `<architecture>.`."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, architecture)
    merged: dict[str, Value] = {key.replace("llama.", f"{architecture}."): value for key, value in LLAMA_KEYS.items()}
    merged.update(keys or {})
    for key, value in merged.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    if tensors is None:
        tensors = {"token_embd.weight": np.zeros((300, 32), dtype=np.float32)}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def bpe_keys(directory: Path, pre: str = "smollm") -> dict[str, Value]:
    """The tokenizer keys of a GGUF with the vocabulary of the tokenizer.json in `directory`."""
    import json

    data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    vocab: dict[str, int] = dict(data["model"]["vocab"])
    special = {token["content"] for token in data["added_tokens"] if token["special"]}
    user = {token["content"]: token["id"] for token in data["added_tokens"] if not token["special"]}
    vocab.update(user)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 4 if token in user else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in data["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


SCALARS = dict(
    zip(("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool"), range(8), strict=True), u64=10, i64=11, f64=12
)
"""GGUF's numbers of the value types that have a fixed size."""
_CODES = dict(zip(SCALARS, "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9


def raw_string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def raw_value(kind: str, value: int | float | str | bytes | Sequence[int | float | str]) -> bytes:
    """A typed value as a file has it. kind: a key of SCALARS or `string`, with `[]` behind it for an array."""
    element = kind.removesuffix("[]")

    def packed(item: int | float | str | bytes) -> bytes:
        return raw_string(item) if isinstance(item, str | bytes) else struct.pack(f"<{_CODES[element]}", item)

    number = struct.pack("<I", SCALARS.get(element, _STRING))
    if kind == element:
        assert isinstance(value, int | float | str | bytes)
        return number + packed(value)
    assert not isinstance(value, int | float)
    return struct.pack("<I", _ARRAY) + number + struct.pack("<Q", len(value)) + b"".join(map(packed, value))


def raw_tensor(name: str, dims: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    """An entry of the list of tensors; dims in the file's order, the fastest first. kind 0: F32."""
    count = struct.pack("<I", len(dims))
    return raw_string(name) + count + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def raw_gguf(
    keys: Sequence[tuple[str, bytes]],
    tensors: Sequence[bytes],
    data_bytes: int = 0,
    *,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file. keys: names with raw_value; tensors: raw_tensor. Counts other than theirs can be claimed."""
    counts = (len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts)
    head += b"".join(raw_string(name) + value for name, value in keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment + data_bytes)
