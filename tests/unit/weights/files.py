"""ModelFiles and GGUF files of tiny models for the weight tests."""

from __future__ import annotations

from pathlib import Path

import gguf
import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model_files.hf_config import hf_model_config
from engine.model_files.types import ModelFiles
from kernels.dispatch import select
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import family_of, spec_of


def hf_files(directory: Path) -> ModelFiles:
    config = hf_model_config(directory)
    shards = tuple(sorted(str(path) for path in directory.glob("*.safetensors")))
    return ModelFiles(str(directory), "safetensors", config, str(directory), shards, str(directory))


def gguf_files(path: Path, like: ModelFiles) -> ModelFiles:
    return msgspec.structs.replace(like, format="gguf", path=str(path), weight_files=(str(path),))


def empty_decoder(files: ModelFiles, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(spec_of(files.config), select("cpu", dtype, ""), "cpu", dtype)


def hf_tensors(files: ModelFiles) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for shard in files.weight_files:
        found |= load_file(shard)
    return found


def permute_rotary_rows(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """What conversion to GGUF does to q and k of the Llama line: halves become interleaved pairs."""
    halves = tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def write_gguf(path: Path, files: ModelFiles, extra: dict[str, np.ndarray] | None = None, kind: str = "F32") -> Path:
    """The tensors of a safetensors model as a GGUF file, named and permuted as converters do.

    extra: further tensors, under their names in the file. kind: of all matrices; the rest is float32.
    """
    raw = gguf.GGMLQuantizationType[kind]
    family, config = family_of(files.config.architecture), files.config
    writer = gguf.GGUFWriter(path, "llama")
    names = {
        family.checkpoint_name(own, family.hf_names): family.checkpoint_name(own, family.gguf_names)
        for own in empty_decoder(files).targets()
    }
    contents: dict[str, np.ndarray] = {}
    for name, tensor in hf_tensors(files).items():
        values = tensor.numpy()
        if family.gguf_permuted_qk and ".q_proj." in name:
            values = permute_rotary_rows(values, config.num_heads)
        if family.gguf_permuted_qk and ".k_proj." in name:
            values = permute_rotary_rows(values, config.num_kv_heads)
        contents[names[name]] = np.ascontiguousarray(values)
    for name, values in (contents | (extra or {})).items():
        if values.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(values, raw), raw_dtype=raw)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
