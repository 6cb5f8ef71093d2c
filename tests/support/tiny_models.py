"""Tiny decoders in the Hugging Face layout, written without torch or transformers so that tests start fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def tiny_config(family: str = "llama", vocab_size: int = 400, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model as a dict; `overrides` are config.json keys (None removes a key)."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "dtype": "float32",
        "use_cache": True,
    }
    if family == "mistral":
        config["sliding_window"] = None
    for key, value in overrides.items():
        if value is None and key != "sliding_window":
            config.pop(key, None)
        else:
            config[key] = value
    return config


def tiny_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors for `config` under their checkpoint names.

    Every parameter, norms and biases too, differs from its neutral value by enough that leaving it out shows:
    logits have a standard deviation of about 2, attention scores one of about 1.5.
    """
    rng = np.random.default_rng(seed)
    family = config["model_type"]
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    qkv_bias = family == "qwen2" or (family in ("llama", "qwen3") and bool(config.get("attention_bias")))
    o_bias = family != "qwen2" and qkv_bias
    mlp_bias = family == "llama" and bool(config.get("mlp_bias"))
    tensors: dict[str, np.ndarray] = {}

    def normal(name: str, shape: tuple[int, ...], std: float) -> None:
        tensors[name] = (rng.standard_normal(shape) * std).astype(np.float32)

    def norm(name: str, size: int) -> None:
        tensors[name] = rng.uniform(0.5, 1.5, size).astype(np.float32)

    def linear(name: str, out_dim: int, in_dim: int, gain: float, bias: bool) -> None:
        normal(f"{name}.weight", (out_dim, in_dim), gain / in_dim**0.5)
        if bias:
            normal(f"{name}.bias", (out_dim,), 0.4)

    normal("model.embed_tokens.weight", (config["vocab_size"], hidden), 0.3)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm.weight", hidden)
        norm(f"{layer}.post_attention_layernorm.weight", hidden)
        linear(f"{layer}.self_attn.q_proj", num_heads * head_dim, hidden, 1.2, qkv_bias)
        linear(f"{layer}.self_attn.k_proj", num_kv_heads * head_dim, hidden, 1.2, qkv_bias)
        linear(f"{layer}.self_attn.v_proj", num_kv_heads * head_dim, hidden, 1.2, qkv_bias)
        linear(f"{layer}.self_attn.o_proj", hidden, num_heads * head_dim, 1.2, o_bias)
        if family == "qwen3":
            norm(f"{layer}.self_attn.q_norm.weight", head_dim)
            norm(f"{layer}.self_attn.k_norm.weight", head_dim)
        linear(f"{layer}.mlp.gate_proj", inner, hidden, 1.5, mlp_bias)
        linear(f"{layer}.mlp.up_proj", inner, hidden, 1.5, mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, inner, 1.5, mlp_bias)
    norm("model.norm.weight", hidden)
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, 2.0, False)
    return tensors


def write_tiny_model(
    dir: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    tokenizer: bool = True,
    vocab_size: int = 400,
    num_shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write a tiny model (and, with `tokenizer`, a tokenizer of `vocab_size` ids) into `dir`; returns `dir`.

    `family` is llama, mistral, qwen2 or qwen3; `config_overrides` are config.json keys such as
    num_hidden_layers=3 or rope_scaling={...}. With num_shards > 1 an index file maps names to shards.
    """
    from safetensors.numpy import save_file

    dir.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, vocab_size, **config_overrides)
    (dir / "config.json").write_text(json.dumps(config, indent=2))
    tensors = tiny_tensors(config, seed)
    if num_shards == 1:
        save_file(tensors, dir / "model.safetensors", metadata={"format": "pt"})
    else:
        names = list(tensors)
        weight_map: dict[str, str] = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
            part = names[shard::num_shards]
            save_file({name: tensors[name] for name in part}, dir / file, metadata={"format": "pt"})
            weight_map.update(dict.fromkeys(part, file))
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
        (dir / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    if tokenizer:
        from tests.support.tiny_tokenizer import write_tiny_tokenizer

        write_tiny_tokenizer(dir, vocab_size)
    return dir
