"""Heads with random weights in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

DRAFT_VOCAB = 100
INNER, HEADS, KV_HEADS, DIM = 96, 4, 2, 16


def write_head(
    folder: Path, target: dict[str, Any], *, prefix: str = "midlayer.", seed: int = 0, **overrides: Any
) -> Path:
    """Of EAGLE-3, for a target's config.json; `overrides` are keys of the head's (None removes a key)."""
    hidden, vocab, rng = target["hidden_size"], target["vocab_size"], np.random.default_rng(seed)
    ids = np.sort(rng.choice(vocab, DRAFT_VOCAB, replace=False))
    tensors = {
        "fc.weight": _matrix(rng, hidden, 2 * hidden),
        **_layer(rng, prefix, hidden, 2 * hidden, overrides.get("head_dim", DIM)),
        f"{prefix}input_layernorm.weight": _norm(rng, hidden),
        f"{prefix}hidden_norm.weight": _norm(rng, hidden),
        "norm.weight": _norm(rng, hidden),
        "lm_head.weight": _matrix(rng, DRAFT_VOCAB, hidden),
        "d2t": (ids - np.arange(DRAFT_VOCAB)).astype(np.int64),
        "t2d": np.isin(np.arange(vocab), ids),
    }
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    return _write(folder, _config(target) | own | overrides, tensors)


def write_eagle_head(
    folder: Path, target: dict[str, Any], *, prefix: str = "", seed: int = 0, **overrides: Any
) -> Path:
    """Of EAGLE, for a target's config.json; `overrides` are keys of the head's (None removes a key)."""
    hidden, rng = target["hidden_size"], np.random.default_rng(seed)
    tensors = {
        "fc.weight": _matrix(rng, hidden, 2 * hidden),
        "fc.bias": _norm(rng, hidden) - 1,
        **_layer(rng, "layers.0.", hidden, hidden, overrides.get("head_dim", DIM)),
        "embed_tokens.weight": _matrix(rng, target["vocab_size"], hidden),
    }
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    return _write(folder, _config(target) | {"architectures": ["LlamaForCausalLMEagle"]} | overrides, named)


def _config(target: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": target["hidden_size"],
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "vocab_size": target["vocab_size"],
    }


def _layer(rng: np.random.Generator, prefix: str, hidden: int, in_dim: int, dim: int) -> dict[str, np.ndarray]:
    return {
        f"{prefix}self_attn.q_proj.weight": _matrix(rng, HEADS * dim, in_dim),
        f"{prefix}self_attn.k_proj.weight": _matrix(rng, KV_HEADS * dim, in_dim),
        f"{prefix}self_attn.v_proj.weight": _matrix(rng, KV_HEADS * dim, in_dim),
        f"{prefix}self_attn.o_proj.weight": _matrix(rng, hidden, HEADS * dim),
        f"{prefix}mlp.gate_proj.weight": _matrix(rng, INNER, hidden),
        f"{prefix}mlp.up_proj.weight": _matrix(rng, INNER, hidden),
        f"{prefix}mlp.down_proj.weight": _matrix(rng, hidden, INNER),
        f"{prefix}post_attention_layernorm.weight": _norm(rng, hidden),
    }


def _matrix(rng: np.random.Generator, out_dim: int, in_dim: int) -> np.ndarray:
    return (rng.standard_normal((out_dim, in_dim)) * 1.2 / in_dim**0.5).astype(np.float32)


def _norm(rng: np.random.Generator, hidden: int) -> np.ndarray:
    return rng.uniform(0.5, 1.5, hidden).astype(np.float32)


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stated = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "model.safetensors")
    return folder
