"""Qwen2 and Qwen2.5: biases on q, k and v, windows per layer."""

from __future__ import annotations

from engine.model_files.types import ModelConfig
from scheduler_proc.models.spec import DecoderSpec, Family, base_spec, windows_by_layer_type


def _spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config, windows_by_layer_type(config), qkv_bias=True)


FAMILY = Family(architectures=("Qwen2ForCausalLM",), spec=_spec)
