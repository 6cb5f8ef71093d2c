"""Llama and what has its shape (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from engine.model_files.types import ModelConfig
from scheduler_proc.models.spec import DecoderSpec, Family, base_spec


def _spec(config: ModelConfig) -> DecoderSpec:
    bias = bool(config.attention_bias)
    full = (None,) * config.num_layers
    return base_spec(config, full, qkv_bias=bias, o_bias=bias, mlp_bias=config.mlp_bias)


FAMILY = Family(architectures=("LlamaForCausalLM",), spec=_spec, gguf_permuted_qk=True)
