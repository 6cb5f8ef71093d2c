"""Heads as they are published, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import ConfigError, EngineError, ModelFileError
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.eagle3 import Eagle3Head
from scheduler_proc.speculative.eagle3_files import load_head, read_spec
from tests.support.eagle_heads import DRAFT_VOCAB, write_head
from tests.support.tiny_models import tiny_config, write_tiny_model
from tests.unit.models.paging import decoder_from, spec_in


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, tokenizer=False)
    return decoder_from(spec_in(folder), {})


def head_in(folder: Path, decoder: Decoder) -> Eagle3Head:
    return load_head(folder, decoder, 64)


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_every_tensor_finds_its_place(decoder: Decoder, tmp_path: Path, prefix: str) -> None:
    head = head_in(write_head(tmp_path, tiny_config(), prefix=prefix), decoder)
    tensors = load_file(tmp_path / "model.safetensors")
    layer = head.layer
    qkv, gate_up = layer.qkv.parameters()["qkv.weight"], layer.gate_up.parameters()["gate_up.weight"]
    assert np.array_equal(qkv[:64].numpy(), tensors[f"{prefix}self_attn.q_proj.weight"])
    assert np.array_equal(qkv[-32:].numpy(), tensors[f"{prefix}self_attn.v_proj.weight"])
    assert np.array_equal(gate_up[96:].numpy(), tensors[f"{prefix}mlp.up_proj.weight"])
    assert np.array_equal(head.d2t.numpy(), tensors["d2t"])
    assert head.spec.layers == (1, 2) and head.spec.draft_vocab_size == DRAFT_VOCAB


def test_layers_that_the_config_leaves_out(tmp_path: Path) -> None:
    write_head(tmp_path, tiny_config(), eagle_config=None)
    assert read_spec(tmp_path, 64, 30).layers == (2, 15, 27)


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"hidden_size": 32}, ConfigError, "the model has 64"),
        ({"target_hidden_size": 128}, ConfigError, "the model has 64"),
        ({"architectures": ["LlamaForCausalLM"]}, ModelFileError, "architectures"),
        ({"num_hidden_layers": 2}, ModelFileError, "num_hidden_layers"),
        ({"draft_vocab_size": 90}, ModelFileError, "lm_head.weight is"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 7]}}, ModelFileError, "below 2"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]}}, ModelFileError, "fc.weight is"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0]}}, ModelFileError, "ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1]}}, ModelFileError, "ascending"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [False, True]}}, ModelFileError, "ascending"),
        ({"architectures": [["odd"]]}, ModelFileError, "architectures"),
    ],
)
def test_a_config_that_does_not_fit(
    decoder: Decoder, tmp_path: Path, change: dict, kind: type[EngineError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        head_in(write_head(tmp_path, tiny_config(), **change), decoder)


def test_tensors_that_do_not_fit(decoder: Decoder, tmp_path: Path) -> None:
    write_head(tmp_path, tiny_config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "d2t": tensors["d2t"] + 400}, path)
    with pytest.raises(ModelFileError, match="beyond the model's 400"):
        head_in(tmp_path, decoder)
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "norm.weight"} | {"odd": tensors["d2t"]}, path
    )
    with pytest.raises(ModelFileError, match=r"missing: norm.weight; unknown: odd"):
        head_in(tmp_path, decoder)
    save_file({**tensors, "d2t": tensors["d2t"].astype(np.float32)}, path)
    with pytest.raises(ModelFileError, match=r"d2t has elements of type torch\.float32"):
        head_in(tmp_path, decoder)
    save_file({**tensors, "layers.0.mlp.up_proj.weight": tensors["midlayer.mlp.up_proj.weight"]}, path)
    with pytest.raises(ModelFileError, match=r"has midlayer\.mlp\.up_proj\.weight twice"):
        head_in(tmp_path, decoder)
    path.unlink()
    path.mkdir()
    with pytest.raises(ModelFileError, match="a directory, not a file"):
        head_in(tmp_path, decoder)
    path.rmdir()
    with pytest.raises(ModelFileError, match="no safetensors file"):
        head_in(tmp_path, decoder)
