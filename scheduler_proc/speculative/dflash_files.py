"""Reading a DFlash drafter as it is published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from engine.config import DFLASH_BLOCK
from engine.model_files.json_file import JsonFile
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.dflash import DFlashModel, DFlashSpec
from scheduler_proc.speculative.head_files import fill, head_spec, read_config, target_layers

ARCHITECTURE = "DFlashDraftModel"
MOST_BLOCK = 64
IGNORED = frozenset({"embed_tokens.weight", "lm_head.weight"})
"""Those are the target's."""
_RENAMED = {"model.": ""}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def read_block_size(directory: Path) -> int:
    """Tokens of a block, the text's last one included. Raises ModelFileError."""
    return _block_size(read_config(directory, [ARCHITECTURE]))


def read_spec(directory: Path, target: Decoder) -> DFlashSpec:
    """Of the drafter in a directory. Raises ModelFileError, and ConfigError where it is another target's."""
    config = read_config(directory, [ARCHITECTURE], target.spec.hidden_size)
    num_layers, mask = config.positive("num_hidden_layers"), config.section("dflash_config").get("mask_token_id")
    vocab_size = target.spec.vocab_size
    if not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise config.error("dflash_config.mask_token_id", f"a token of the model, below {vocab_size}", mask)
    return DFlashSpec(
        **vars(head_spec(config)),
        windows=_windows(config, num_layers),
        block_size=_block_size(config),
        mask_id=mask,
        layers=_target_layers(config, num_layers, target.spec.num_layers),
    )


@torch.inference_mode()
def load_drafter(directory: Path, target: Decoder, max_position: int) -> DFlashModel:
    """The drafter in a directory, on its target's device and in its dtype. Raises ModelFileError, ConfigError."""
    spec = read_spec(directory, target)
    model = DFlashModel(spec, target, max_position)
    fill(directory, "DFlash drafter", model.targets(), renamed=_RENAMED, ignored=IGNORED)
    return model


def _block_size(config: JsonFile) -> int:
    section = config.section("dflash_config")
    size = (section if section.get("block_size") is not None else config).positive("block_size", default=DFLASH_BLOCK)
    if not 2 <= size <= MOST_BLOCK:
        raise config.error("block_size", f"2 to {MOST_BLOCK}", size)
    return size


def _windows(config: JsonFile, num_layers: int) -> tuple[int | None, ...]:
    types = config.get("layer_types")
    if types is None:
        return (None,) * num_layers
    if not isinstance(types, Sequence) or len(types) != num_layers or not all(one in _LAYER_TYPES for one in types):
        raise config.error("layer_types", f"{num_layers} of {', '.join(_LAYER_TYPES)}", types)
    return tuple(config.positive("sliding_window") if one == "sliding_attention" else None for one in types)


def _target_layers(config: JsonFile, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Before which of the target's layers its hidden states are taken."""
    ids = config.section("dflash_config").get("target_layer_ids")
    if ids is None:
        # Spread over the layers from the second to the last but two.
        last = max(num_target_layers - 3, 1)
        steps = max(num_layers - 1, 1)
        ids = [min(round(1 + index * (last - 1) / steps), num_target_layers - 1) for index in range(num_layers)]
    return target_layers(config, "dflash_config.target_layer_ids", ids, num_target_layers)
