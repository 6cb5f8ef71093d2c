"""Loading safetensors: whole, sharded, other dtypes, and everything that can be wrong with names and shapes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelFileError
from scheduler_proc.weights.load import load_weights
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import empty_decoder, hf_files, hf_tensors


def _rewrite(directory: Path, change) -> None:
    """Apply `change` to the dict of tensors of a one-file model."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_reaches_its_place(tmp_path: Path, family: str, num_shards: int) -> None:
    files = hf_files(write_tiny_model(tmp_path, family, tokenizer=False, num_shards=num_shards))
    assert len(files.weight_files) == num_shards
    decoder = empty_decoder(files)
    calls: list[tuple[str, int, int]] = []
    load_weights(decoder, files, lambda *call: calls.append(call))
    tensors, parameters = hf_tensors(files), decoder.parameters()
    layer = "model.layers.1"
    for kind in ("weight", "bias") if family == "qwen2" else ("weight",):
        qkv = torch.cat([tensors[f"{layer}.self_attn.{p}_proj.{kind}"] for p in "qkv"])
        assert torch.equal(parameters[f"layers.1.attn.qkv.{kind}"], qkv)
    gate_up = torch.cat([tensors[f"{layer}.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    assert torch.equal(parameters["layers.1.mlp.gate_up.weight"], gate_up)
    assert torch.equal(parameters["layers.1.mlp_norm.weight"], tensors[f"{layer}.post_attention_layernorm.weight"])
    assert torch.equal(parameters["lm_head.weight"], tensors["lm_head.weight"])
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in tensors.values())
    assert len(calls) == len(tensors)
    assert calls[-1] == (files.weight_files[-1], calls[-1][2], calls[-1][2])
    assert [call[1] for call in calls] == sorted(call[1] for call in calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_dtype_is_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    directory = write_tiny_model(tmp_path, tokenizer=False)
    _rewrite(directory, lambda tensors: tensors.update({k: v.to(dtype) for k, v in tensors.items()}))
    files = hf_files(directory)
    wide, narrow = empty_decoder(files), empty_decoder(files, dtype)
    load_weights(wide, files)
    load_weights(narrow, files)
    stored = hf_tensors(files)["lm_head.weight"]
    assert torch.equal(wide.parameters()["lm_head.weight"], stored.float())
    assert torch.equal(narrow.parameters()["lm_head.weight"], stored)


def test_all_misfits_in_one_error(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, tokenizer=False, num_hidden_layers=3)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".0." in name or ".1." in name]:
            del tensors[name]
        tensors["model.norm.weight"] = torch.zeros(7)
        tensors["model.vision.weight"] = torch.zeros(2, 3)

    _rewrite(directory, spoil)
    files = hf_files(directory)
    with pytest.raises(ModelFileError) as caught:
        load_weights(empty_decoder(files), files)
    message = caught.value.message
    assert "18 missing tensors: model.layers.0.input_layernorm.weight [64]" in message
    assert "and 10 more" in message
    file = files.weight_files[0]
    assert f"1 tensors of the wrong shape: model.norm.weight in {file}: expected [64], found [7]" in message
    assert f"1 tensors the model has no place for: model.vision.weight [2, 3] in {file}" in message


def test_missing_head_of_an_untied_model(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, tokenizer=False)
    _rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    files = hf_files(directory)
    with pytest.raises(ModelFileError, match=r"1 missing tensors: lm_head\.weight \[400, 64\]"):
        load_weights(empty_decoder(files), files)


def test_ignorable_names_are_ignored(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=True)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _rewrite(directory, add)
    files = hf_files(directory)
    load_weights(empty_decoder(files), files)
    _rewrite(directory, lambda tensors: tensors["lm_head.weight"].add_(1))
    with pytest.raises(ModelFileError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_weights(empty_decoder(files), files)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a Git LFS pointer"),
        (b"\x00" * 100, "not a readable safetensors file"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes | None, message: str) -> None:
    files = hf_files(write_tiny_model(tmp_path, tokenizer=False))
    broken = tmp_path / "broken.safetensors"
    if content is not None:
        broken.write_bytes(content)
    files = msgspec.structs.replace(files, weight_files=(str(broken),))
    with pytest.raises(ModelFileError, match=f"broken.safetensors: {message}"):
        load_weights(empty_decoder(files), files)


def test_element_types_that_are_no_weights(tmp_path: Path) -> None:
    directory = write_tiny_model(tmp_path, tokenizer=False)
    _rewrite(directory, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}))
    files = hf_files(directory)
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight has the unsupported element type F8_E4M3"):
        load_weights(empty_decoder(files), files)
