"""config.json (older and transformers-5 keys) -> ModelConfig."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from engine.errors import ModelFileError
from engine.model_files.hf_rope import rope_config
from engine.model_files.json_file import JsonFile, read_json
from engine.model_files.types import ModelConfig

_DTYPES = ("float32", "float16", "bfloat16")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_TIED_BY_DEFAULT = ("Gemma", "Cohere", "Starcoder2")
"""Families whose config class ties embeddings unless the file says otherwise, so their files may leave the key out."""


def hf_model_config(directory: Path) -> ModelConfig:
    """The ModelConfig of a HF model directory: config.json, generation_config.json and the tokenizer's eos.

    Raises ModelFileError naming the file, the key and what was expected.
    """
    config = read_json(directory / "config.json")
    architecture = _architecture(config)
    if "hidden_size" not in config.data and isinstance(config.data.get("text_config"), Mapping):
        # A multimodal config: the decoder's keys lie one level down, shared ones (dtype, eos) may lie on top.
        config = JsonFile(config.path, {**config.data, **config.section("text_config").data})

    hidden_size = config.positive("hidden_size")
    num_heads = config.positive("num_attention_heads")
    num_layers = config.positive("num_hidden_layers")
    num_kv_heads = config.positive("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads {num_heads}", num_kv_heads)
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads {num_heads}", hidden_size)
    head_dim = config.positive("head_dim", default=hidden_size // num_heads)
    max_position = config.positive("max_position_embeddings")
    tied = architecture.startswith(_TIED_BY_DEFAULT)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        norm_eps=config.number("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"),
        rope=rope_config(config, max_position),
        tie_embeddings=config.boolean("tie_word_embeddings", default=tied),
        attention_bias=config.boolean("attention_bias") if config.get("attention_bias") is not None else None,
        mlp_bias=config.boolean("mlp_bias", default=False),
        sliding_window=_sliding_window(config, architecture),
        layer_types=_layer_types(config, num_layers),
        max_window_layers=config.natural("max_window_layers") if config.get("max_window_layers") is not None else None,
        hidden_act=config.string("hidden_act", "hidden_activation", default="silu"),
        bos_id=_first_id(config, "bos_token_id"),
        eos_ids=_eos_ids(directory, config),
        dtype=_dtype(config),
    )


def _architecture(config: JsonFile) -> str:
    names = config.get("architectures")
    if not isinstance(names, Sequence) or isinstance(names, str) or not names or not isinstance(names[0], str):
        raise config.error("architectures", "a list with the model's class name", names)
    return names[0]


def _sliding_window(config: JsonFile, architecture: str) -> int | None:
    # Qwen's files always state a window; the class ignores it unless use_sliding_window is on.
    used = config.boolean("use_sliding_window", default=not architecture.startswith("Qwen"))
    # MistralConfig's own default, which its first files rely on; null switches the window off.
    if architecture == "MistralForCausalLM" and not config.has("sliding_window"):
        return 4096
    if not used or config.get("sliding_window") is None:
        return None
    return config.positive("sliding_window")


def _layer_types(config: JsonFile, num_layers: int) -> tuple[str, ...]:
    types = config.get("layer_types")
    if types is None:
        return ()
    if not isinstance(types, Sequence) or len(types) != num_layers or not all(kind in _LAYER_TYPES for kind in types):
        raise config.error("layer_types", f"{num_layers} entries, each one of {', '.join(_LAYER_TYPES)}", types)
    return tuple(types)


def _dtype(config: JsonFile) -> str:
    dtype = config.string("dtype", "torch_dtype", default="float32").removeprefix("torch.")
    if dtype not in _DTYPES:
        raise config.error("dtype", f"one of {', '.join(_DTYPES)}", dtype)
    return dtype


def _first_id(config: JsonFile, key: str) -> int | None:
    ids = _ids(config, key)
    return ids[0] if ids else None


def _ids(config: JsonFile, key: str) -> list[int]:
    value = config.get(key)
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise config.error(key, "a token id or a list of them", value)
    return [id for id in ids if id >= 0]


def _eos_ids(directory: Path, config: JsonFile) -> tuple[int, ...]:
    ids = _ids(config, "eos_token_id")
    generation = directory / "generation_config.json"
    if generation.is_file():
        ids += _ids(read_json(generation), "eos_token_id")
    tokenizer_eos = _tokenizer_eos_id(directory)
    if tokenizer_eos is not None:
        ids.append(tokenizer_eos)
    return tuple(dict.fromkeys(ids))


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _AddedTokens(msgspec.Struct):
    """The part of tokenizer.json wanted here; the megabytes of vocabulary are skipped without building objects."""

    added_tokens: list[_AddedToken] = []


def _tokenizer_eos_id(directory: Path) -> int | None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    eos = config.get("eos_token")
    text = eos.get("content") if isinstance(eos, Mapping) else eos
    if not isinstance(text, str):
        return None
    added = config.get("added_tokens_decoder")
    if isinstance(added, Mapping):
        for id, token in added.items():
            if isinstance(token, Mapping) and token.get("content") == text and id.isdecimal():
                return int(id)
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        return None
    try:
        tokens = msgspec.json.decode(tokenizer.read_bytes(), type=_AddedTokens).added_tokens
    except (msgspec.DecodeError, OSError) as error:
        raise ModelFileError(f"{tokenizer}: not a readable tokenizer.json: {error}") from error
    return next((token.id for token in tokens if token.content == text), None)
