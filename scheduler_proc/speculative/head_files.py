"""What reading heads and drafters has in common: a directory with config.json and safetensors files, as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from engine.errors import ConfigError, ModelFileError
from engine.model_files.hf_rope import rope_config
from engine.model_files.json_file import JsonFile, read_json
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.speculative.head import HeadSpec
from scheduler_proc.weights.checkpoint import CheckpointTensor
from scheduler_proc.weights.safetensors_files import safetensors_tensors

_INTEGERS = frozenset({"d2t"})
"""Tensors of ids; all others are of floats."""


def read_config(directory: Path, architectures: Sequence[str], target_hidden: int | None = None) -> JsonFile:
    """config.json of a head of one of these architectures, for a target of so many elements (None: any). Raises
    ModelFileError, and ConfigError where the head is another target's."""
    config = read_json(directory / "config.json")
    names = config.get("architectures")
    if not isinstance(names, Sequence) or not any(name in names for name in architectures):
        raise config.error("architectures", " or ".join(f"[{name!r}]" for name in architectures), names)
    hidden = config.positive("hidden_size")
    for what, asked in (
        ("hidden_size", config.positive("target_hidden_size", default=hidden)),
        ("hidden_size of its own", hidden),
    ):
        if target_hidden is not None and asked != target_hidden:
            raise ConfigError(
                f"--speculative-draft-model-path {directory} is for a {what} of {asked}, the model has {target_hidden}."
            )
    return config


def check_single_layer(config: JsonFile) -> None:
    """Raises ModelFileError for a head of several."""
    if config.get("num_hidden_layers") is not None and config.positive("num_hidden_layers") != 1:
        raise config.error("num_hidden_layers", "1", config.get("num_hidden_layers"))


def head_spec(config: JsonFile) -> HeadSpec:
    """Of a head's layer. Raises ModelFileError."""
    hidden, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    return HeadSpec(
        hidden_size=hidden,
        intermediate_size=config.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", default=num_heads),
        head_dim=config.positive("head_dim", default=hidden // num_heads),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=rope_config(config, config.positive("max_position_embeddings", default=1 << 20)),
    )


def fill(
    directory: Path,
    kind: str,
    targets: Mapping[str, LoadTarget],
    *,
    renamed: Mapping[str, str],
    ignored: Set[str],
    optional: Set[str] = frozenset(),
) -> dict[str, CheckpointTensor]:
    """Load the tensors of a directory to their targets, and return those that were `ignored`. kind: what it
    is, for messages; renamed: beginnings of names that differ; optional: what may be missing. Raises ModelFileError."""
    files = sorted(str(path) for path in directory.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{directory}: no safetensors file; a head in another format must be converted")
    found: dict[str, CheckpointTensor] = {}
    for tensor in safetensors_tensors(files):
        name = _own_name(tensor.name, renamed)
        if name in found:
            raise ModelFileError(f"{directory} is no {kind} of this model: it has {name} twice")
        found[name] = tensor
    missing = sorted(targets.keys() - found.keys() - optional)
    unknown = sorted(found.keys() - targets.keys() - ignored)
    misshapen = [
        f"{name} is {list(found[name].shape)}, not {list(target.shape)}"
        for name, target in targets.items()
        if name in found and found[name].shape != target.shape
    ]
    problems = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
    if problems or misshapen:
        raise ModelFileError(f"{directory} is no {kind} of this model: {'; '.join(problems + misshapen)}")
    for name, target in targets.items():
        if name not in found:
            continue
        tensor = found[name].read()
        if tensor.is_floating_point() == (name in _INTEGERS):
            raise ModelFileError(f"{directory}: {name} has elements of type {tensor.dtype}")
        try:
            target.load(tensor)
        except ValueError as error:
            raise ModelFileError(f"{directory}: {name}: {error}") from error
    return {name: tensor for name, tensor in found.items() if name in ignored}


def target_layers(config: JsonFile, key: str, ids: object, num_layers: int) -> tuple[int, ...]:
    """Before which of the target's num_layers layers its hidden states are taken, where those after the layers `ids`
    are wanted. Raises ModelFileError for anything but different layers, ascending."""
    is_list = isinstance(ids, Sequence) and all(type(one) is int and 0 <= one < num_layers for one in ids)
    if not is_list or not ids or list(ids) != sorted(set(ids)):
        raise config.error(key, f"different layers of the target, ascending, below {num_layers}", ids)
    # The states after a layer are those before the next.
    return tuple(one + 1 for one in ids)


def _own_name(name: str, renamed: Mapping[str, str]) -> str:
    for prefix, own in renamed.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name
