"""A GGUF header -> ModelConfig, for the architectures the engine has a GGUF weight map for."""

from __future__ import annotations

import math
import struct

from engine.errors import ModelFileError
from engine.model_files.gguf_header import GgufHeader
from engine.model_files.types import ModelConfig, RopeConfig

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""general.architecture -> the class name of the same family's HF checkpoints."""

_TOKENS = "tokenizer.ggml.tokens"
_EMBEDDING = "token_embd.weight"
_LARGEST = 2**31 - 1
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_model_config(header: GgufHeader) -> ModelConfig:
    """The ModelConfig of a GGUF file. Raises ModelFileError for other architectures and missing or wrong keys."""
    family = header.string("general.architecture")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelFileError(f"{header.path}: GGUF architecture {family[:80]!r} is not supported, only {known}")
    num_files = header.integer("split.count", 1)
    if num_files > 1:
        raise ModelFileError(
            f"{header.path}: one of {num_files} parts of a split GGUF, which is not read; "
            "merge the parts first (llama-gguf-split --merge)"
        )
    if header.integer(f"{family}.expert_count", 0):
        raise ModelFileError(
            f"{header.path}: GGUF mixture-of-experts models of architecture {family!r} are not supported"
        )
    hidden_size = _positive(header, f"{family}.embedding_length")
    vocab_size = _vocab_size(header, family, hidden_size)
    num_layers = _positive(header, f"{family}.block_count")
    # Before anything is allocated for layers that a wrong number says there are.
    if num_layers > len(header.tensors):
        raise ModelFileError(
            f"{header.path}: {family}.block_count is {num_layers}, but there are only {len(header.tensors)} tensors"
        )
    num_heads = _positive(header, f"{family}.attention.head_count")
    key_length = f"{family}.attention.key_length"
    if not header.has(key_length) and hidden_size % num_heads:
        raise ModelFileError(
            f"{header.path}: {num_heads} heads do not divide {family}.embedding_length {hidden_size}, "
            f"and {key_length} is missing"
        )
    head_dim = _positive(header, key_length, hidden_size // num_heads)
    if head_dim % 2:
        raise ModelFileError(f"{header.path}: heads of {head_dim} dimensions cannot be rotated in pairs")
    num_kv_heads = _positive(header, f"{family}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ModelFileError(f"{header.path}: {num_kv_heads} key-value heads do not divide {num_heads} heads")
    if header.integer(f"{family}.attention.value_length", head_dim) != head_dim:
        raise ModelFileError(f"{header.path}: values and keys of different length are not supported")
    if header.integer(f"{family}.rope.dimension_count", head_dim) != head_dim:
        raise ModelFileError(
            f"{header.path}: {family}.rope.dimension_count must equal the head size {head_dim} (no partial rotation)"
        )
    bos_id = header.optional_integer("tokenizer.ggml.bos_token_id")
    return ModelConfig(
        architecture=ARCHITECTURES[family],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_positive(header, f"{family}.feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=_positive(header, f"{family}.context_length"),
        norm_eps=_positive_number(header, f"{family}.attention.layer_norm_rms_epsilon"),
        rope=_rope(header, family, head_dim),
        tie_embeddings="output.weight" not in header.tensors,
        attention_bias="blk.0.attn_q.bias" in header.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in header.tensors,
        sliding_window=_sliding_window(header, f"{family}.attention.sliding_window"),
        bos_id=bos_id if bos_id is not None and 0 <= bos_id < vocab_size else None,
        eos_ids=tuple(id for id in gguf_eos_ids(header) if 0 <= id < vocab_size),
        dtype="float32",
    )


def gguf_eos_ids(header: GgufHeader) -> tuple[int, ...]:
    """Every id that ends a text or a turn, in the order eos, eot, eom, without repeats."""
    found = (header.optional_integer(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    return tuple(dict.fromkeys(id for id in found if id is not None))


def _vocab_size(header: GgufHeader, family: str, hidden_size: int) -> int:
    tensor = header.tensors.get(_EMBEDDING)
    if tensor is None:
        raise ModelFileError(f"{header.path}: no {_EMBEDDING} tensor (a vocabulary-only file?)")
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size:
        raise ModelFileError(
            f"{header.path}: {_EMBEDDING} must have rows of {family}.embedding_length {hidden_size}, "
            f"not the shape {tensor.shape}"
        )
    # The embedding's rows decide: some files state a vocab_size that leaves out padding rows.
    rows = tensor.shape[0]
    stated = header.integer(f"{family}.vocab_size", header.count(_TOKENS) if header.has(_TOKENS) else rows)
    if stated > rows:
        raise ModelFileError(f"{header.path}: the vocabulary has {stated} tokens, {_EMBEDDING} only {rows} rows")
    return rows


def _sliding_window(header: GgufHeader, key: str) -> int | None:
    """None where the file has none, which it may say as 0."""
    return _positive(header, key) if header.integer(key, 0) else None


def _rope(header: GgufHeader, family: str, head_dim: int) -> RopeConfig:
    prefix = f"{family}.rope.scaling"
    theta = _positive_number(header, f"{family}.rope.freq_base", 10_000.0)
    kind = header.string(f"{prefix}.type", "none")
    if "rope_freqs.weight" in header.tensors:
        if kind != "none":
            raise ModelFileError(f"{header.path}: both rope_freqs.weight and {prefix}.type {kind[:80]!r} are given")
        return RopeConfig(theta=theta, kind="factors", factors=_rope_factors(header, head_dim))
    if kind == "none":
        legacy = _positive_number(header, f"{family}.rope.scale_linear", 1.0)
        return RopeConfig(theta=theta, kind="linear", factor=legacy) if legacy != 1.0 else RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise ModelFileError(f"{header.path}: rope scaling {kind[:80]!r} is not supported, only none, linear and yarn")
    factor = _positive_number(header, f"{prefix}.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    scale = _positive_number(header, f"{prefix}.attn_factor", 1.0)
    return RopeConfig(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=_positive(
            header, f"{prefix}.original_context_length", _positive(header, f"{family}.context_length")
        ),
        beta_fast=_positive_number(header, f"{prefix}.yarn_beta_fast", 32.0),
        beta_slow=_positive_number(header, f"{prefix}.yarn_beta_slow", 1.0),
        # GGUF's factor multiplies YaRN's own magnitude scale (arXiv:2309.00071, eq. 22); ours replaces it.
        attention_factor=None if scale == 1.0 else scale * (0.1 * math.log(factor) + 1.0),
    )


def _rope_factors(header: GgufHeader, head_dim: int) -> tuple[float, ...]:
    tensor = header.tensors["rope_freqs.weight"]
    if tensor.type.name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelFileError(
            f"{header.path}: rope_freqs.weight must be F32 of {head_dim // 2} values, "
            f"not {tensor.type.name} of shape {tensor.shape}"
        )
    with open(header.path, "rb") as file:
        file.seek(tensor.offset)
        factors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.size_bytes))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise ModelFileError(f"{header.path}: rope_freqs.weight must hold positive numbers")
    return factors


def _positive(header: GgufHeader, key: str, default: int | None = None) -> int:
    value = header.integer(key, default)
    if not 0 < value <= _LARGEST:
        raise ModelFileError(f"{header.path}: {key} must be positive and at most {_LARGEST}, not {value}")
    return value


def _positive_number(header: GgufHeader, key: str, default: float | None = None) -> float:
    value = header.number(key, default)
    if not (value > 0 and math.isfinite(value)):
        raise ModelFileError(f"{header.path}: {key} must be a positive number, not {value:g}")
    return value
