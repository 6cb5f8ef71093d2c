"""The same weights in the forms that peers want: a float32 HF directory for vLLM, Q4_0 for llama.cpp's fast path."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from engine.errors import ModelFileError
from engine.model_files.gguf_config import gguf_model_config
from engine.model_files.gguf_header import read_gguf_header
from engine.model_files.types import ModelConfig
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.library import LibraryTokenizer
from engine.tokenizer.load import tokenizer_from_path

if TYPE_CHECKING:
    from torch import Tensor

_REQUANTISED = ("Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K")


def make_hf(gguf: Path, folder: Path) -> None:
    """Write config.json, model.safetensors (float32) and tokenizer files of a Llama-family GGUF file into `folder`.

    Raises ModelFileError for other families, scaled rotary embeddings and sentencepiece vocabularies.
    """
    from safetensors.torch import save_file

    config = gguf_model_config(read_gguf_header(gguf))
    if config.architecture != "LlamaForCausalLM" or config.rope.kind != "default":
        raise ModelFileError(f"{gguf}: only Llama models without rotary scaling are converted")
    tokenizer = tokenizer_from_path(gguf)
    if not isinstance(tokenizer, LibraryTokenizer):
        raise ModelFileError(f"{gguf}: its tokenizer has no tokenizer.json form")
    folder.mkdir(parents=True, exist_ok=True)
    # config.json last: a directory that has it is whole.
    (folder / "config.json").unlink(missing_ok=True)
    save_file(dict(_hf_tensors(gguf, config)), folder / "model.safetensors", metadata={"format": "pt"})
    # The wrapper has no way to save of its own, and needs none but here.
    tokenizer._library.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(tokenizer, config))
    _write_json(folder / "config.json", _hf_config(config))


def _hf_tensors(gguf: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    from scheduler_proc.models.llama import FAMILY
    from scheduler_proc.models.spec import GGUF_NAMES, HF_NAMES
    from scheduler_proc.weights.gguf_file import gguf_tensors, unpermute_rotary_rows

    stems = {pattern: own for own, pattern in GGUF_NAMES.items()}
    for tensor in gguf_tensors([str(gguf)]):
        if FAMILY.is_ignored(tensor.name):
            continue
        stem, _, kind = tensor.name.rpartition(".")
        layer = stem.split(".")[1] if stem.startswith("blk.") else ""
        own = stems[stem.replace(f"blk.{layer}.", "blk.{i}.") if layer else stem]
        value = tensor.read()
        if own.endswith("attn.q"):
            value = unpermute_rotary_rows(value, config.num_heads)
        elif own.endswith("attn.k"):
            value = unpermute_rotary_rows(value, config.num_kv_heads)
        yield f"{HF_NAMES[own].replace('{i}', layer)}.{kind}", value.contiguous()


def _hf_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": [config.architecture],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "tie_word_embeddings": config.tie_embeddings,
        "attention_bias": bool(config.attention_bias),
        "mlp_bias": config.mlp_bias,
        "hidden_act": config.hidden_act,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids),
        "torch_dtype": "float32",
    }


def _tokenizer_config(tokenizer: Tokenizer, config: ModelConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
        **tokenizer.special_tokens,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def make_q4_0(gguf: Path, target: Path, llama_quantize: Path | None) -> None:
    """Write `gguf` with its matrices as Q4_0, an 8-bit embedding left as it is, by llama-quantize where there is one.

    Raises ModelFileError if llama-quantize fails.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    if llama_quantize is None:
        _requantise(gguf, part)
    else:
        arguments = ["--allow-requantize", "--token-embedding-type", "q8_0", "--output-tensor-type", "q8_0"]
        done = subprocess.run(
            [llama_quantize, *arguments, gguf, part, "Q4_0"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ModelFileError(f"{llama_quantize.name} failed: {(done.stderr or done.stdout).strip()[-300:]}")
    os.replace(part, target)


def find_llama_quantize(llama_server: Path | None) -> Path | None:
    """llama-quantize beside llama-server."""
    found = llama_server.parent / "llama-quantize" if llama_server else None
    return found if found is not None and found.is_file() else None


def _requantise(source: Path, target: Path) -> None:
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    written = {"general.architecture", "general.file_type"}
    for field in reader.fields.values():
        if field.name in written or field.name.startswith("GGUF."):
            continue
        kind, inner = field.types[0], field.types[-1]
        writer.add_key_value(field.name, field.contents(), kind, inner if kind == GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        if tensor.tensor_type.name in _REQUANTISED:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            data = quants.quantize(values, GGMLQuantizationType.Q4_0)
            writer.add_tensor(tensor.name, data, raw_dtype=GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(tensor.name, np.asarray(tensor.data), raw_dtype=tensor.tensor_type)
    writer.add_file_type(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
