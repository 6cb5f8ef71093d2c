"""Qwen3 (dense): norms on query and key heads, windows per layer, biases only where the config asks."""

from __future__ import annotations

from engine.model_files.types import ModelConfig
from scheduler_proc.models.spec import DecoderSpec, Family, base_spec, windows_by_layer_type


def _spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return base_spec(config, windows_by_layer_type(config), qk_norm=True, qkv_bias=bias, o_bias=bias)


FAMILY = Family(architectures=("Qwen3ForCausalLM",), spec=_spec)
