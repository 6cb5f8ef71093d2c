"""Reading an EAGLE-3 head as it is published: a directory with config.json and safetensors files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.errors import ConfigError, ModelFileError
from engine.model_files.hf_rope import rope_config
from engine.model_files.json_file import JsonFile, read_json
from kernels.dispatch import KernelSet
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.eagle3 import Eagle3Head, Eagle3Spec
from scheduler_proc.weights.checkpoint import CheckpointTensor
from scheduler_proc.weights.safetensors_files import safetensors_tensors

ARCHITECTURE = "LlamaForCausalLMEagle3"
IGNORED = frozenset({"t2d", "embed_tokens.weight"})
"""Which tokens of the target the head knows follows from d2t; embeddings are the target's."""
_RENAMED = {"layers.0.": "midlayer."}


def read_spec(directory: Path, target_hidden: int, target_layers: int) -> Eagle3Spec:
    """Of the head in a directory, for a target of so many elements and layers. Raises ModelFileError, and ConfigError
    where the head is another target's."""
    config = read_json(directory / "config.json")
    names = config.get("architectures")
    if not isinstance(names, Sequence) or ARCHITECTURE not in names:
        raise config.error("architectures", f"[{ARCHITECTURE!r}]", names)
    hidden = config.positive("hidden_size")
    for what, asked, own in (
        ("hidden_size", config.positive("target_hidden_size", default=hidden), target_hidden),
        ("hidden_size of its own", hidden, target_hidden),
    ):
        if asked != own:
            raise ConfigError(
                f"--speculative-draft-model-path {directory} is for a {what} of {asked}, the model has {own}."
            )
    num_heads = config.positive("num_attention_heads")
    if config.get("num_hidden_layers") is not None and config.positive("num_hidden_layers") != 1:
        raise config.error("num_hidden_layers", "1", config.get("num_hidden_layers"))
    max_position = config.positive("max_position_embeddings", default=1 << 20)
    return Eagle3Spec(
        hidden_size=hidden,
        intermediate_size=config.positive("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", default=num_heads),
        head_dim=config.positive("head_dim", default=hidden // num_heads),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        rope=rope_config(config, max_position),
        draft_vocab_size=config.positive("draft_vocab_size", "vocab_size"),
        layers=_layers(config, target_layers),
    )


def _layers(config: JsonFile, num_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers its hidden states are taken."""
    ids = config.section("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))
    if not isinstance(ids, Sequence) or not all(isinstance(one, int) and 0 <= one < num_layers for one in ids):
        raise config.error("eagle_aux_hidden_state_layer_ids", f"layers of the target, below {num_layers}", ids)
    # The states after a layer are those before the next.
    return tuple(one + 1 for one in ids)


@torch.inference_mode()
def load_head(
    directory: Path, kernels: KernelSet, decoder: Decoder, dtype: torch.dtype, max_position: int
) -> Eagle3Head:
    """The head in a directory, on its target's device. Raises ModelFileError, ConfigError."""
    spec = read_spec(directory, decoder.spec.hidden_size, decoder.spec.num_layers)
    files = sorted(str(path) for path in directory.glob("*.safetensors"))
    if not files:
        raise ModelFileError(f"{directory}: no safetensors file; a head in another format must be converted")
    head = Eagle3Head(spec, kernels, decoder.device, dtype, max_position)
    found = {_own_name(tensor): tensor for tensor in safetensors_tensors(files)}
    targets = head.targets()
    missing = sorted(targets.keys() - found.keys())
    unknown = sorted(found.keys() - targets.keys() - IGNORED)
    misshapen = [
        f"{name} is {list(found[name].shape)}, not {list(shape)}"
        for name, (shape, _) in targets.items()
        if name in found and found[name].shape != shape
    ]
    problems = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"unknown: {', '.join(unknown)}"] * bool(unknown)
    if problems or misshapen:
        raise ModelFileError(f"{directory} is no EAGLE-3 head of this model: {'; '.join(problems + misshapen)}")
    for name, (_, load) in targets.items():
        load(found[name].read())
    ids = torch.arange(spec.draft_vocab_size, device=head.d2t.device) + head.d2t
    if int(ids.min()) < 0 or int(ids.max()) >= decoder.spec.vocab_size:
        raise ModelFileError(f"{directory}: d2t names tokens beyond the model's {decoder.spec.vocab_size}")
    return head


def _own_name(tensor: CheckpointTensor) -> str:
    for prefix, own in _RENAMED.items():
        if tensor.name.startswith(prefix):
            return own + tensor.name.removeprefix(prefix)
    return tensor.name
