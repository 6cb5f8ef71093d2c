"""Loading GGUF: every element type, the rotary permutation, and errors."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelFileError
from kernels.packed_rows import PACKED_KINDS
from scheduler_proc.weights.gguf_file import READABLE_TYPES, gguf_tensors, has_packed_matrices, unpermute_rotary_rows
from scheduler_proc.weights.load import load_weights
from tests.support.tiny_models import write_tiny_model
from tests.unit.weights.files import empty_decoder, gguf_files, hf_files, permute_rotary_rows, write_gguf

# The gguf package can read these but not write them: their blocks are made of random bytes.
_READ_ONLY = ("Q4_K", "Q5_K", "Q6_K")


def _write(path: Path, tensors: dict[str, tuple[np.ndarray, Type]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stored(kind: Type, rows: int, columns: int) -> np.ndarray:
    """A tensor as the file holds it."""
    rng = np.random.default_rng(int(kind))
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind.name not in _READ_ONLY:
        return gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    # The float16 scales must be finite: random bytes are kept to small exponents.
    for place in {"Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,)}[kind.name]:
        data[..., place] = rng.integers(0x20, 0x3C, data.shape[:-1])
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", READABLE_TYPES)
def test_every_type(tmp_path: Path, name: str) -> None:
    kind = Type[name]
    matrix, small = _stored(kind, 700, 256), _stored(kind, 1, 256)
    path = _write(tmp_path / "x.gguf", {"matrix": (matrix, kind), "small": (small, kind)})
    for tensor, data in zip(gguf_tensors([str(path)]), (matrix, small), strict=True):
        value = tensor.read()
        expected = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        assert tensor.shape == tuple(value.shape) == tuple(expected.shape)
        assert value.dtype == torch.float32
        assert bool(value.isfinite().all())
        assert torch.equal(value, expected)
        if name not in PACKED_KINDS:
            assert tensor.read_packed is None
            continue
        assert tensor.read_packed is not None
        packed = tensor.read_packed()
        assert (packed.kind, packed.shape) == (name, tensor.shape)
        assert torch.equal(packed.data, torch.from_numpy(data))
        assert torch.equal(packed.dequantise(), expected)
    assert has_packed_matrices([str(path)]) == (name in PACKED_KINDS)


@pytest.mark.parametrize("shape", [(32,), (2, 3, 32)])
def test_only_matrices_stay_packed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    data = gguf.quants.quantize(values, Type.Q5_0)
    path = _write(tmp_path / "x.gguf", {"tensor": (data, Type.Q5_0)})
    (tensor,) = gguf_tensors([str(path)])
    assert tensor.read_packed is None
    assert torch.equal(tensor.read(), torch.from_numpy(gguf.quants.dequantize(data, Type.Q5_0)))
    assert not has_packed_matrices([str(path)])


def test_reading_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = _write(tmp_path / "x.gguf", {"matrix": (_stored(Type.Q4_0, 4, 64), Type.Q4_0)})
    content = path.read_bytes()
    read_packed = gguf_tensors([str(path)])[0].read_packed
    assert read_packed is not None
    read_packed().data.fill_(7)
    assert path.read_bytes() == content


def test_other_types_are_refused_by_name(tmp_path: Path) -> None:
    data = np.zeros((2, 66), dtype=np.uint8)
    path = _write(tmp_path / "x.gguf", {"blk.0.attn_q.weight": (data, Type.TQ2_0)})
    with pytest.raises(
        ModelFileError, match=r"x\.gguf: tensor blk\.0\.attn_q\.weight has the type TQ2_0.*readable: F32"
    ):
        gguf_tensors([str(path)])


@pytest.mark.parametrize("shape", [(24, 5), (24,)])
def test_unpermute(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    permuted = torch.from_numpy(permute_rotary_rows(tensor.numpy(), 3))
    assert not torch.equal(permuted, tensor)
    # Within a head of 8 rows, row 1 of the file is row 4 of the model.
    assert torch.equal(permuted[1], tensor[4])
    assert torch.equal(unpermute_rotary_rows(permuted, 3), tensor)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_same_parameters_as_safetensors(tmp_path: Path, family: str, tied: bool) -> None:
    overrides = {"attention_bias": True} if family == "llama" else {}
    files = hf_files(write_tiny_model(tmp_path, family, tokenizer=False, tie_word_embeddings=tied, **overrides))
    expected, got = empty_decoder(files), empty_decoder(files)
    load_weights(expected, files)
    path = write_gguf(tmp_path / "m.gguf", files, {"rope_freqs.weight": np.ones(8, np.float32)})
    load_weights(got, gguf_files(path, files))
    for name, parameter in expected.parameters().items():
        assert torch.equal(got.parameters()[name], parameter), name


def test_errors_use_the_file_names(tmp_path: Path) -> None:
    files = hf_files(write_tiny_model(tmp_path, tokenizer=False))
    path = write_gguf(tmp_path / "m.gguf", files, {"blk.9.attn_q.weight": np.zeros((2, 2), np.float32)})
    with pytest.raises(ModelFileError, match=r"no place for: blk\.9\.attn_q\.weight \[2, 2\] in .*m\.gguf"):
        load_weights(empty_decoder(files), gguf_files(path, files))
