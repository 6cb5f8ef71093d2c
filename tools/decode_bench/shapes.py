"""Models that are measured without files: their config.json, and the bytes that a decode step must read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.model_files.hf_config import hf_model_config
from engine.model_files.types import ModelConfig, ModelFiles
from scheduler_proc.settle import flops_per_token

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "eos_token_id": 128_009,
        "dtype": "bfloat16",
    },
    "0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 151_645,
        "dtype": "bfloat16",
    },
    "tiny": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 12_000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    },
}
"""Llama 3.1 8B, Qwen 3 0.6B, and one that runs anywhere."""


def shaped_model(name: str, folder: Path) -> ModelFiles:
    """A model of one of SHAPES with made-up weights; its config.json is written into `folder`."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name], indent=2))
    return dummy_model(name, folder)


def dummy_model(name: str, folder: Path) -> ModelFiles:
    """A model with the config.json in `folder`, made-up weights and no tokenizer. Raises ModelFileError."""
    return ModelFiles(name, "dummy", hf_model_config(folder), str(folder), (), "")


def weight_bytes(model: ModelConfig, item_bytes: int = 2) -> int:
    """Bytes of the matrices that every decode step reads whole, at `item_bytes` a number."""
    return item_bytes * (flops_per_token(model) // 2 + model.vocab_size * model.hidden_size)


def token_bytes(model: ModelConfig, item_bytes: int = 2) -> int:
    """Bytes of one token's keys and values in all layers."""
    return item_bytes * model.num_layers * 2 * model.num_kv_heads * model.head_dim
