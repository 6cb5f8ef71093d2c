"""Specs from configs, the registry, and the rotary kinds that transformers has no class for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.errors import ModelFileError
from engine.model_files.types import ModelConfig, RopeConfig
from scheduler_proc.layers.rotary import cos_sin_cache, frequencies_and_scale
from scheduler_proc.models.decoder import Decoder, KvShape
from scheduler_proc.models.registry import family_of, spec_of
from tests.unit.models.paging import cpu_kernels


def _config(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 128,
        "norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tie_embeddings": False,
    }
    return ModelConfig(**(fields | changes))


def test_unknown_architecture_lists_the_known() -> None:
    with pytest.raises(
        ModelFileError, match=r"'BertModel' is not supported; supported: LlamaForCausalLM, Mistral.*Qwen3"
    ):
        family_of("BertModel")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"num_kv_heads": 3}, "4 heads cannot share 3"),
        ({"architecture": "Qwen2ForCausalLM", "layer_types": ("full_attention",)}, "names 1 layers, the model has 3"),
        ({"architecture": "Qwen3ForCausalLM", "layer_types": ("linear_attention",) * 3}, "'linear_attention'"),
    ],
)
def test_unsupported_configs(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        spec_of(_config(**changes))


def test_windows() -> None:
    assert spec_of(_config("MistralForCausalLM", sliding_window=9)).windows == (9, 9, 9)
    assert spec_of(_config("LlamaForCausalLM", sliding_window=9)).windows == (None,) * 3
    assert spec_of(_config("Qwen2ForCausalLM", sliding_window=9)).windows == (None,) * 3
    assert spec_of(_config("Qwen2ForCausalLM", sliding_window=9, max_window_layers=2)).windows == (None, None, 9)
    kinds = ("sliding_attention", "full_attention", "sliding_attention")
    spec = spec_of(_config("Qwen3ForCausalLM", sliding_window=9, layer_types=kinds, max_window_layers=0))
    assert spec.windows == (9, None, 9)
    assert spec_of(_config("Qwen3ForCausalLM", layer_types=kinds)).windows == (None,) * 3


def test_biases() -> None:
    assert spec_of(_config("Qwen2ForCausalLM", attention_bias=False)).qkv_bias
    assert not spec_of(_config("Qwen2ForCausalLM", attention_bias=True)).o_bias
    assert not spec_of(_config("MistralForCausalLM", attention_bias=True)).qkv_bias
    assert spec_of(_config("Qwen3ForCausalLM", attention_bias=True)).o_bias
    assert not spec_of(_config("Qwen3ForCausalLM")).qkv_bias


def test_rope_factors_divide_frequencies() -> None:
    llama3 = RopeConfig(kind="llama3", factor=8.0, original_max_position=64)
    plain, _ = frequencies_and_scale(RopeConfig(), 16)
    scaled, _ = frequencies_and_scale(llama3, 16)
    factors = RopeConfig(kind="factors", factors=tuple((plain / scaled).tolist()))
    torch.testing.assert_close(frequencies_and_scale(factors, 16)[0], scaled)
    assert float((scaled / plain).min()) == pytest.approx(1 / 8)
    with pytest.raises(ModelFileError, match="8 frequency factors given, 4 needed"):
        frequencies_and_scale(factors, 8)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_rope_needs_the_original_context(kind: str) -> None:
    with pytest.raises(ModelFileError, match="needs original_max_position_embeddings"):
        cos_sin_cache(RopeConfig(kind=kind, factor=2.0), 8, 4, torch.device("cpu"))  # ty: ignore[invalid-argument-type]


def test_decoder_facts() -> None:
    decoder = Decoder(spec_of(_config(tie_embeddings=True)), cpu_kernels(), "cpu", torch.float32)
    assert decoder.kv_shape == KvShape(3, 2, 8)
    parameters = decoder.parameters()
    assert parameters["layers.2.attn.qkv.weight"].shape == (4 * 8 + 2 * 2 * 8, 32)
    assert parameters["layers.0.mlp.gate_up.weight"].shape == (96, 32)
    assert "lm_head.weight" not in parameters
    assert decoder.targets()["layers.1.attn.k.weight"].shape == (16, 32)
