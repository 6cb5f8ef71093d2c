from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.model_files.gguf_config import gguf_model_config
from engine.model_files.gguf_header import read_gguf_header
from engine.model_files.types import ModelConfig, RopeConfig
from tests.support.gguf_writer import Value, write_gguf

EMBEDDING = np.zeros((300, 32), dtype=np.float32)


def config(tmp_path: Path, architecture: str = "llama", tensors: dict[str, np.ndarray] | None = None, **keys: Value):
    dotted = {key.replace("__", "."): value for key, value in keys.items()}
    path = write_gguf(
        tmp_path / "m.gguf",
        architecture=architecture,
        keys=dotted,
        tensors={"token_embd.weight": EMBEDDING, **(tensors or {})},
    )
    return gguf_model_config(read_gguf_header(path))


def test_llama(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        tensors={"output.weight": EMBEDDING},
        llama__vocab_size=300,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__eos_token_id=2,
        tokenizer__ggml__eot_token_id=5,
        tokenizer__ggml__eom_token_id=2,
    )
    assert found == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position=128,
        norm_eps=pytest.approx(1e-5),
        rope=RopeConfig(),
        tie_embeddings=False,
        attention_bias=False,
        bos_id=1,
        eos_ids=(2, 5),
    )


@pytest.mark.parametrize(("family", "name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")])
def test_qwen(tmp_path: Path, family: str, name: str) -> None:
    found = config(
        tmp_path,
        family,
        tensors={"blk.0.attn_q.bias": np.zeros(64, dtype=np.float32)},
        **{f"{family}__attention__key_length": 16, f"{family}__rope__freq_base": 1e6},
    )
    assert (found.architecture, found.head_dim, found.rope.theta) == (name, 16, 1e6)
    assert found.attention_bias is True
    assert found.tie_embeddings is True


def test_rope_kinds(tmp_path: Path) -> None:
    linear = config(tmp_path, llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert linear.rope == RopeConfig(kind="linear", factor=4.0)
    yarn = config(
        tmp_path,
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=32,
    )
    assert yarn.rope == RopeConfig(kind="yarn", factor=4.0, original_max_position=32)
    factors = config(tmp_path, tensors={"rope_freqs.weight": np.array([1, 2, 4, 8], dtype=np.float32)})
    assert factors.rope == RopeConfig(kind="factors", factors=(1.0, 2.0, 4.0, 8.0))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama__rope__scaling__type": "longrope"}, "only none, linear and yarn"),
        ({"llama__rope__dimension_count": 4}, "no partial rotation"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__attention__head_count": 0}, "head_count must be positive"),
        ({"llama__attention__head_count": 5}, "heads do not divide"),
        ({"llama__attention__head_count_kv": 3}, "key-value heads do not divide"),
        ({"llama__block_count": "many"}, "must be an integer"),
        ({"llama__vocab_size": 301}, "only 300 rows"),
        ({"split__count": 2}, "merge the parts"),
        ({"llama__block_count": 2}, "block_count is 2, but there are only 1 tensors"),
        ({"llama__context_length": 2**31}, "context_length must be positive and at most"),
        ({"llama__embedding_length": 64}, r"rows of llama\.embedding_length 64, not the shape \(300, 32\)"),
        ({"llama__attention__key_length": 7, "llama__rope__dimension_count": 7}, "cannot be rotated in pairs"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "epsilon must be a positive number, not nan"),
        ({"llama__rope__freq_base": -1.0}, "freq_base must be a positive number, not -1"),
        ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 0.0}, "factor must be a positive"),
    ],
)
def test_errors(tmp_path: Path, keys: dict[str, Value], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config(tmp_path, **keys)


def test_ids_beyond_the_vocabulary_are_none(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        tokenizer__ggml__bos_token_id=2**32 - 1,
        tokenizer__ggml__eos_token_id=300,
        tokenizer__ggml__eot_token_id=299,
    )
    assert (found.bos_id, found.eos_ids) == (None, (299,))


@pytest.mark.parametrize(("window", "expected"), [(0, None), (16, 16)])
def test_sliding_window(tmp_path: Path, window: int, expected: int | None) -> None:
    assert config(tmp_path, llama__attention__sliding_window=window).sliding_window == expected


def test_other_architectures_are_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="'mamba' is not supported, only llama, qwen2, qwen3"):
        config(tmp_path, "mamba")


def test_wrong_rope_factors(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="F32 of 4 values"):
        config(tmp_path, tensors={"rope_freqs.weight": np.ones(3, dtype=np.float32)})
    with pytest.raises(ModelFileError, match="positive"):
        config(tmp_path, tensors={"rope_freqs.weight": np.array([1, 0, 1, 1], dtype=np.float32)})
