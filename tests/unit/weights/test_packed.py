"""Matrices that stay packed: which targets get them, in which order of rows, and what is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest
import torch
from torch import Tensor

from engine.errors import ModelFileError
from engine.model_files.types import ModelFiles
from kernels.packed_rows import PackedRows
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.weights.load import load_weights
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import empty_decoder, gguf_files, hf_files, hf_tensors, write_gguf


@dataclass
class Taken:
    """What the targets of a decoder were given."""

    values: dict[str, Tensor | PackedRows] = field(default_factory=dict)

    def load(self, files: ModelFiles, keeps: str = "weight") -> Mapping[str, int]:
        """Load a model whose matrices named `...keeps` stay packed."""
        decoder = empty_decoder(files)
        targets = {
            name: replace(
                target,
                load=lambda value, name=name: self.values.__setitem__(name, value),
                takes_packed=len(target.shape) == 2 and name.endswith(keeps),
            )
            for name, target in decoder.targets().items()
        }
        return load_weights(_decoder(decoder, targets), files)


def _decoder(decoder: Decoder, targets: Mapping[str, LoadTarget]) -> Decoder:
    """What the loader sees of one, with other targets."""
    return cast(Decoder, SimpleNamespace(spec=decoder.spec, device=decoder.device, targets=lambda: targets))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_matrices_arrive_packed(tmp_path: Path, family: str, kind: str) -> None:
    files = hf_files(write_tiny_model(tmp_path, family, tokenizer=False))
    files = gguf_files(write_gguf(tmp_path / "m.gguf", files, kind=kind), files)
    packed, floats = Taken(), Taken()
    counts = packed.load(files)
    assert not floats.load(files, keeps="nothing")
    assert counts == {kind: sum(value.ndim == 2 for value in floats.values.values() if isinstance(value, Tensor))}
    assert packed.values.keys() == floats.values.keys()
    for name, expected in floats.values.items():
        value = packed.values[name]
        assert isinstance(expected, Tensor)
        if expected.ndim == 2:
            assert isinstance(value, PackedRows), name
            value = value.dequantise()
        assert isinstance(value, Tensor)
        assert torch.equal(value, expected), name


def test_floats_are_left_to_the_target(tmp_path: Path) -> None:
    files = hf_files(write_tiny_model(tmp_path, tokenizer=False))
    for own in (files, gguf_files(write_gguf(tmp_path / "m.gguf", files, kind="F16"), files)):
        taken = Taken()
        assert taken.load(own, keeps=".mlp.up.weight") == {"int8": files.config.num_layers}
        assert all(isinstance(value, Tensor) for value in taken.values.values())
    dummy = msgspec.structs.replace(files, format="dummy", weight_files=())
    assert Taken().load(dummy, keeps=".mlp.up.weight") == {"int8": files.config.num_layers}


def test_a_tied_head_is_compared_as_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = hf_files(write_tiny_model(tmp_path, tokenizer=False, tie_word_embeddings=True))
    embed = hf_tensors(files)["model.embed_tokens.weight"].numpy()
    same = write_gguf(tmp_path / "same.gguf", files, {"output.weight": embed}, kind="Q8_0")
    other = write_gguf(tmp_path / "other.gguf", files, {"output.weight": -embed}, kind="Q8_0")
    with pytest.raises(ModelFileError, match=r"output\.weight differs from token_embd\.weight"):
        Taken().load(gguf_files(other, files))

    def dequantise(rows: PackedRows) -> Tensor:
        raise AssertionError("not needed")

    monkeypatch.setattr(PackedRows, "dequantise", dequantise)
    assert Taken().load(gguf_files(same, files))["Q8_0"] > 0
