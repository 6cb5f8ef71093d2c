"""Drafters as they are published, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError, EngineError, ModelFileError
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.speculative.dflash_files import load_drafter, read_block_size, read_spec
from tests.support.dflash_drafters import BLOCK, MASK, write_drafter
from tests.support.tiny_models import tiny_config, write_tiny_model
from tests.unit.models.paging import decoder_from, spec_in


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, tokenizer=False)
    return decoder_from(spec_in(folder), {})


def test_what_a_config_says(decoder: Decoder, tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    spec = read_spec(write_drafter(tmp_path, tiny_config(), layer_types=types, sliding_window=9), decoder)
    assert spec.windows == (None, 9) and spec.layers == (1, 2)
    assert (spec.block_size, spec.mask_id) == (BLOCK, MASK)
    own = {"mask_token_id": MASK, "block_size": 3, "target_layer_ids": [0, 1]}
    write_drafter(tmp_path, tiny_config(), dflash_config=own, block_size=None, layer_types=None)
    spec = read_spec(tmp_path, decoder)
    assert spec.block_size == 3 and spec.windows == (None, None)
    write_drafter(tmp_path, tiny_config(), dflash_config={"mask_token_id": MASK}, block_size=None)
    assert read_block_size(tmp_path) == 16


@pytest.mark.parametrize(
    ("change", "kind", "said"),
    [
        ({"hidden_size": 32}, ConfigError, "the model has 64"),
        ({"architectures": [["odd"]]}, ModelFileError, "architectures"),
        ({"block_size": 1}, ModelFileError, "block_size must be 2 to 64"),
        ({"block_size": 1000}, ModelFileError, "block_size must be 2 to 64"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, ModelFileError, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 400, "target_layer_ids": [0, 1]}}, ModelFileError, "below 400"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 0]}}, ModelFileError, "ascending"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]}}, ModelFileError, "below 2"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1]}}, ModelFileError, r"fc\.weight is"),
        ({"layer_types": ["full_attention"]}, ModelFileError, "layer_types"),
        ({"layer_types": [{}, {}]}, ModelFileError, "layer_types"),
        ({"num_hidden_layers": 3, "layer_types": None}, ModelFileError, r"missing: layers\.2\."),
    ],
)
def test_a_config_that_does_not_fit(
    decoder: Decoder, tmp_path: Path, change: dict, kind: type[EngineError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        load_drafter(write_drafter(tmp_path, tiny_config(), **change), decoder, 64)
