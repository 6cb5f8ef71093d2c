"""EAGLE heads as they are published, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ConfigError, EngineError, ModelFileError
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.eagle import EagleHead
from scheduler_proc.speculative.eagle_files import load_head
from tests.support.eagle_heads import write_eagle_head
from tests.support.tiny_models import tiny_config, write_tiny_model
from tests.unit.models.paging import decoder_from, spec_in

NORM = "layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, tokenizer=False)
    return decoder_from(spec_in(folder), {})


def head_in(folder: Path, decoder: Decoder) -> EagleHead:
    return load_head(folder, decoder, 64)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLMEagle", "LlamaForCausalLM"])
def test_every_tensor_finds_its_place(decoder: Decoder, tmp_path: Path, prefix: str, architecture: str) -> None:
    head = head_in(write_eagle_head(tmp_path, tiny_config(), prefix=prefix, architectures=[architecture]), decoder)
    tensors = load_file(tmp_path / "model.safetensors")
    qkv, fc = head.layer.qkv.parameters()["qkv.weight"], head.fc.parameters()
    assert np.array_equal(qkv[64:96].numpy(), tensors[f"{prefix}layers.0.self_attn.k_proj.weight"])
    assert np.array_equal(fc["fc.weight"].numpy(), tensors[f"{prefix}fc.weight"])
    assert np.array_equal(fc["fc.bias"].numpy(), tensors[f"{prefix}fc.bias"])
    assert {prefix + name for name in head.targets()} == tensors.keys() - {f"{prefix}embed_tokens.weight"}
    assert head.layers == (3,) and head.num_ids == 400


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"hidden_size": 32}, ConfigError, "the model has 64"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ModelFileError, "architectures"),
        ({"num_hidden_layers": 2}, ModelFileError, "num_hidden_layers"),
        ({"intermediate_size": 90}, ModelFileError, "layers.0.mlp.gate_proj.weight is"),
    ],
)
def test_a_config_that_does_not_fit(
    decoder: Decoder, tmp_path: Path, change: dict, kind: type[EngineError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        head_in(write_eagle_head(tmp_path, tiny_config(), **change), decoder)


def test_tensors_that_do_not_fit(decoder: Decoder, tmp_path: Path) -> None:
    write_eagle_head(tmp_path, tiny_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    fc, rest = tensors["fc.weight"], {name: tensor for name, tensor in tensors.items() if name != "fc.weight"}
    save_file({**rest, "odd": fc}, path)
    with pytest.raises(ModelFileError, match=r"no EAGLE head of this model: missing: fc.weight; unknown: odd"):
        head_in(tmp_path, decoder)
    save_file({**rest, "fc.weight": fc[:, :100].copy()}, path)
    with pytest.raises(ModelFileError, match=r"fc.weight is \[64, 100\], not \[64, 128\]"):
        head_in(tmp_path, decoder)
    path.unlink()
    with pytest.raises(ModelFileError, match="no safetensors file"):
        head_in(tmp_path, decoder)


def test_tensors_that_need_not_be_there(decoder: Decoder, tmp_path: Path) -> None:
    """The bias, what is the target's, and a norm that does nothing."""
    write_eagle_head(tmp_path, tiny_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["fc.bias"]
    save_file({**tensors, "lm_head.weight": tensors["embed_tokens.weight"], NORM: np.ones(64, np.float32)}, path)
    assert not head_in(tmp_path, decoder).fc.parameters()["fc.bias"].any()
    del tensors["embed_tokens.weight"]
    save_file({**tensors, NORM: np.full(64, 0.5, np.float32)}, path)
    with pytest.raises(ModelFileError, match=f"{NORM} is not all ones"):
        head_in(tmp_path, decoder)
