"""Which models --tp-size can share, and how it says so."""

from __future__ import annotations

import msgspec
import pytest

from engine.errors import ConfigError
from engine.model_files.types import ModelConfig
from engine.sharing import check_shares
from tests.support.fake_client import tiny_files


@pytest.fixture
def model() -> ModelConfig:
    return msgspec.structs.replace(tiny_files().config, num_heads=12, num_kv_heads=4, intermediate_size=144)


@pytest.mark.parametrize("size", [1, 2, 4, 12])
def test_shares_that_can_be_cut(model: ModelConfig, size: int) -> None:
    check_shares(model, size)


@pytest.mark.parametrize("size", [3, 5, 6, 8, 24])
def test_shares_that_cannot_be_cut(model: ModelConfig, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"--tp-size {size} .*12 heads.*allowed for this model: 1, 2, 4, 12\."):
        check_shares(model, size)


def test_an_mlp_that_cannot_be_cut(model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"MLP of 146; allowed for this model: 1, 2\."):
        check_shares(msgspec.structs.replace(model, intermediate_size=146), 4)
