"""Small GGUF files for tests, written by the reference library."""

from __future__ import annotations

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
