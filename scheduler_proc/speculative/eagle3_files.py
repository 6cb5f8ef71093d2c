"""Reading an EAGLE-3 head as it is published."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.errors import ModelFileError
from engine.model_files.json_file import JsonFile
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.eagle3 import Eagle3Head, Eagle3Spec
from scheduler_proc.speculative.head_files import check_single_layer, fill, head_spec, read_config, target_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"
IGNORED = frozenset({"t2d", "embed_tokens.weight"})
"""Which tokens of the target the head knows follows from d2t; embeddings are the target's."""
_RENAMED = {"layers.0.": "midlayer."}


def read_spec(directory: Path, target_hidden: int, target_layers: int) -> Eagle3Spec:
    """Of the head in a directory, for a target of so many elements and layers. Raises ModelFileError, and ConfigError
    where the head is another target's."""
    config = read_config(directory, [ARCHITECTURE], target_hidden)
    check_single_layer(config)
    return Eagle3Spec(
        **vars(head_spec(config)),
        draft_vocab_size=config.positive("draft_vocab_size", "vocab_size"),
        layers=_layers(config, target_layers),
    )


def _layers(config: JsonFile, num_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers its hidden states are taken."""
    ids = config.section("eagle_config").get("eagle_aux_hidden_state_layer_ids")
    if ids is None:
        return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))
    return target_layers(config, "eagle_aux_hidden_state_layer_ids", ids, num_layers)


@torch.inference_mode()
def load_head(directory: Path, target: Decoder, max_position: int) -> Eagle3Head:
    """The head in a directory, on its target's device and in its dtype. Raises ModelFileError, ConfigError."""
    spec = read_spec(directory, target.spec.hidden_size, target.spec.num_layers)
    head = Eagle3Head(spec, target, max_position)
    fill(directory, "EAGLE-3 head", head.targets(), renamed=_RENAMED, ignored=IGNORED)
    ids = torch.arange(spec.draft_vocab_size, device=head.d2t.device) + head.d2t
    if int(ids.min()) < 0 or int(ids.max()) >= target.spec.vocab_size:
        raise ModelFileError(f"{directory}: d2t names tokens beyond the model's {target.spec.vocab_size}")
    return head
