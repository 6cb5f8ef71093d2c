"""Mistral: Llama's block, with a sliding window on every layer where the config sets one."""

from __future__ import annotations

from engine.model_files.types import ModelConfig
from scheduler_proc.models.spec import DecoderSpec, Family, base_spec


def _spec(config: ModelConfig) -> DecoderSpec:
    return base_spec(config, (config.sliding_window,) * config.num_layers)


FAMILY = Family(architectures=("MistralForCausalLM",), spec=_spec, gguf_permuted_qk=True)
