from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.model_files.hf_config import hf_model_config
from engine.model_files.types import ModelConfig, RopeConfig

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def config(directory: Path, **changes: object) -> ModelConfig:
    data = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(data))
    return hf_model_config(directory)


def test_least_file(tmp_path: Path) -> None:
    assert config(tmp_path) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        max_position=512,
        norm_eps=1e-5,
        rope=RopeConfig(),
        tie_embeddings=False,
    )


def test_older_and_newer_keys_mean_the_same(tmp_path: Path) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "rope_type": "llama3",
    }
    old = config(tmp_path, rope_theta=500000.0, rope_scaling=llama3, torch_dtype="bfloat16", head_dim=16)
    new = config(tmp_path, rope_parameters={**llama3, "rope_theta": 500000.0}, dtype="bfloat16", head_dim=16)
    assert old == new
    assert old.dtype == "bfloat16"
    assert old.head_dim == 16
    assert old.rope == RopeConfig(
        theta=500000.0, kind="llama3", factor=8.0, original_max_position=128, low_freq_factor=1.0, high_freq_factor=4.0
    )


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(kind="linear", factor=2.0)),
        ({"rope_type": "default"}, RopeConfig()),
        ({"type": "dynamic", "factor": 2}, RopeConfig(kind="dynamic", factor=2.0, original_max_position=512)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16, "mscale": 0.7},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=128, beta_fast=16.0, mscale=0.7),
        ),
        (
            {"type": "yarn", "original_max_position_embeddings": 128, "attention_factor": 1.5, "truncate": False},
            RopeConfig(kind="yarn", factor=4.0, original_max_position=128, attention_factor=1.5, truncate=False),
        ),
    ],
)
def test_rope_kinds(tmp_path: Path, rope: dict[str, object], expected: RopeConfig) -> None:
    assert config(tmp_path, rope_scaling=rope).rope == expected


def test_rope_by_layer_type_is_taken_where_all_agree(tmp_path: Path) -> None:
    same = {"rope_type": "default", "rope_theta": 5.0}
    assert config(tmp_path, rope_parameters={"full_attention": same, "sliding_attention": same}).rope.theta == 5.0
    with pytest.raises(ModelFileError, match="same for every layer type"):
        config(tmp_path, rope_parameters={"full_attention": same, "sliding_attention": {"rope_type": "default"}})


def test_windows(tmp_path: Path) -> None:
    assert config(tmp_path, sliding_window=64).sliding_window == 64
    qwen = ["Qwen2ForCausalLM"]
    assert config(tmp_path, architectures=qwen, sliding_window=64, use_sliding_window=False).sliding_window is None
    assert config(tmp_path, architectures=qwen, sliding_window=64).sliding_window is None
    found = config(
        tmp_path,
        architectures=qwen,
        sliding_window=64,
        use_sliding_window=True,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    assert (found.sliding_window, found.max_window_layers) == (64, 1)
    assert found.layer_types == ("full_attention", "sliding_attention")


def test_multimodal_config_yields_its_decoder(tmp_path: Path) -> None:
    decoder = {key: value for key, value in BASE.items() if key != "architectures"}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlavaModel"], "dtype": "float16", "text_config": decoder})
    )
    found = hf_model_config(tmp_path)
    assert (found.architecture, found.hidden_size, found.dtype) == ("LlavaModel", 32, "float16")


def test_eos_ids_are_merged(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<e>"}}))
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [{"id": 9, "content": "<e>", "special": True}], "model": {"vocab": {"a": 1}}})
    )
    assert config(tmp_path, eos_token_id=2, bos_token_id=1).eos_ids == (2, 7, 9)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<e>", "added_tokens_decoder": {"11": {"content": "<e>"}}})
    )
    found = config(tmp_path, eos_token_id=[2], bos_token_id=1)
    assert (found.eos_ids, found.bos_id) == ((2, 7, 11), 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": []}, "architectures must be a list"),
        ({"architectures": "absent"}, "architectures must be a list with the model's class name, it is missing"),
        ({"hidden_size": "absent"}, "hidden_size must be a positive integer, it is missing"),
        ({"hidden_size": "32"}, "hidden_size must be a positive integer, not '32'"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer"),
        ({"vocab_size": True}, "vocab_size must be a positive integer"),
        ({"rms_norm_eps": "absent"}, "rms_norm_eps or layer_norm_eps"),
        ({"num_key_value_heads": 3}, "a divisor of num_attention_heads 4"),
        ({"hidden_size": 30}, "a multiple of num_attention_heads 4"),
        ({"rope_scaling": {"type": "longrope"}}, "one of default, linear, dynamic, llama3, yarn"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial rotation is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "one of float32, float16, bfloat16"),
        ({"eos_token_id": "end"}, "eos_token_id must be a token id"),
        ({"layer_types": ["full_attention"]}, "2 entries"),
    ],
)
def test_errors_name_file_key_and_expectation(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json: .*" + message):
        config(tmp_path, **changes)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such file"):
        hf_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="not valid JSON"):
        hf_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelFileError, match="must hold a JSON object"):
        hf_model_config(tmp_path)


def test_mistral_without_a_window_key_has_its_class_default(tmp_path: Path) -> None:
    mistral = ["MistralForCausalLM"]
    assert config(tmp_path, architectures=mistral).sliding_window == 4096
    assert config(tmp_path, architectures=mistral, sliding_window=None).sliding_window is None
