"""DFlash drafters with random weights in the published layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 6
MASK = 2


def write_drafter(
    folder: Path, target: dict[str, Any], *, num_layers: int = 2, seed: int = 0, **overrides: Any
) -> Path:
    """For a target's config.json; `overrides` are keys of the drafter's (None removes a key)."""
    from safetensors.numpy import save_file

    hidden, inner, heads, kv_heads, dim = target["hidden_size"], 96, 4, 2, overrides.get("head_dim", 16)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 2048,
        "vocab_size": target["vocab_size"],
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
        "layer_types": ["full_attention"] * num_layers,
    }
    config = {key: value for key, value in {**config, **overrides}.items() if value is not None}
    rng = np.random.default_rng(seed)

    def matrix(out_dim: int, in_dim: int) -> np.ndarray:
        return (rng.standard_normal((out_dim, in_dim)) * 1.2 / in_dim**0.5).astype(np.float32)

    def norm(size: int = hidden) -> np.ndarray:
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {"fc.weight": matrix(hidden, 2 * hidden), "hidden_norm.weight": norm(), "norm.weight": norm()}
    for index in range(num_layers):
        layer = f"layers.{index}"
        tensors |= {
            f"{layer}.self_attn.q_proj.weight": matrix(heads * dim, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(kv_heads * dim, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(kv_heads * dim, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, heads * dim),
            f"{layer}.self_attn.q_norm.weight": norm(dim),
            f"{layer}.self_attn.k_norm.weight": norm(dim),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.post_attention_layernorm.weight": norm(),
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
