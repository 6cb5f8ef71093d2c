"""Heads with random weights in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

DRAFT_VOCAB = 100


def write_head(
    folder: Path, target: dict[str, Any], *, prefix: str = "midlayer.", seed: int = 0, **overrides: Any
) -> Path:
    """For a target's config.json; `overrides` are keys of the head's (None removes a key)."""
    from safetensors.numpy import save_file

    hidden, inner, heads, kv_heads, dim = target["hidden_size"], 96, 4, 2, overrides.get("head_dim", 16)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]},
    }
    config = {key: value for key, value in {**config, **overrides}.items() if value is not None}
    rng = np.random.default_rng(seed)

    def matrix(out_dim: int, in_dim: int) -> np.ndarray:
        return (rng.standard_normal((out_dim, in_dim)) * 1.2 / in_dim**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return rng.uniform(0.5, 1.5, hidden).astype(np.float32)

    ids = np.sort(rng.choice(target["vocab_size"], DRAFT_VOCAB, replace=False))
    tensors = {
        "fc.weight": matrix(hidden, 2 * hidden),
        f"{prefix}self_attn.q_proj.weight": matrix(heads * dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": matrix(kv_heads * dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": matrix(hidden, heads * dim),
        f"{prefix}mlp.gate_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.up_proj.weight": matrix(inner, hidden),
        f"{prefix}mlp.down_proj.weight": matrix(hidden, inner),
        f"{prefix}input_layernorm.weight": norm(),
        f"{prefix}hidden_norm.weight": norm(),
        f"{prefix}post_attention_layernorm.weight": norm(),
        "norm.weight": norm(),
        "lm_head.weight": matrix(DRAFT_VOCAB, hidden),
        "d2t": (ids - np.arange(DRAFT_VOCAB)).astype(np.int64),
        "t2d": np.isin(np.arange(target["vocab_size"]), ids),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
