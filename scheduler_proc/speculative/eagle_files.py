"""Reading an EAGLE head as it is published."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.errors import ModelFileError
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.eagle import EagleHead
from scheduler_proc.speculative.head import HeadSpec
from scheduler_proc.speculative.head_files import check_single_layer, fill, head_spec, read_config

ARCHITECTURES = ("LlamaForCausalLMEagle", "LlamaForCausalLM")
"""The second is what its authors wrote into theirs."""
_INPUT_NORM = "layers.0.input_layernorm.weight"
IGNORED = frozenset({"embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq", _INPUT_NORM})
"""The first two are the target's, the third follows from the configuration."""
_RENAMED = {"model.": ""}


def read_spec(directory: Path, target_hidden: int) -> HeadSpec:
    """Of the head in a directory, for a target of so many elements. Raises ModelFileError, and ConfigError where the
    head is another target's."""
    config = read_config(directory, ARCHITECTURES, target_hidden)
    check_single_layer(config)
    return head_spec(config)


@torch.inference_mode()
def load_head(directory: Path, target: Decoder, max_position: int) -> EagleHead:
    """The head in a directory, on its target's device and in its dtype. Raises ModelFileError, ConfigError."""
    head = EagleHead(read_spec(directory, target.spec.hidden_size), target, max_position)
    rest = fill(directory, "EAGLE head", head.targets(), renamed=_RENAMED, ignored=IGNORED, optional={"fc.bias"})
    norm = rest.get(_INPUT_NORM)
    # The layer has no such norm; who saved it as a model's has one of ones in the file.
    if norm is not None and not bool((norm.read() == 1).all()):
        raise ModelFileError(f"{directory} is no EAGLE head of this model: {_INPUT_NORM} is not all ones")
    return head
