"""The KV pool's layout by type, what poison reads as, and how many tokens fit."""

from __future__ import annotations

import pytest
import torch

from engine.errors import ConfigError
from scheduler_proc.cache.kv_pool import SCALE_BYTES, KVPool, bytes_per_token, default_tokens, fraction_tokens

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
CPU = torch.device("cpu")


def pool(dtype: torch.dtype) -> KVPool:
    return KVPool(num_layers=2, num_pages=5, page_size=4, num_kv_heads=3, head_dim=16, dtype=dtype, device=CPU)


def values(layer: torch.Tensor) -> torch.Tensor:
    """float32 [num_pages, 2, page_size, num_kv_heads, head_dim]: what the pages hold."""
    if layer.dtype != torch.int8:
        return layer.float()
    codes, scale = layer[..., :-SCALE_BYTES], layer[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return codes * scale


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pages_start_empty_and_are_filled_alone(dtype: torch.dtype) -> None:
    made = pool(dtype)
    assert [layer.dtype for layer in made.layers] == [dtype] * 2
    assert all(not values(layer).any() for layer in made.layers)
    made.fill(torch.tensor([3, 1]), 1.0e4)
    for layer in made.layers:
        held = values(layer)
        assert held.shape == (5, 2, 4, 3, 16)
        torch.testing.assert_close(held[[1, 3]], torch.full((2, 2, 4, 3, 16), 1.0e4), rtol=1e-2, atol=0)
        assert not held[[0, 2, 4]].any()
    made.fill(torch.zeros(0, dtype=torch.int64), 1.0)
    assert not values(made.layers[0])[0].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_per_token_are_those_of_the_pool(dtype: torch.dtype) -> None:
    held = sum(layer.nbytes for layer in pool(dtype).layers)
    assert held == 5 * 4 * bytes_per_token(num_layers=2, num_kv_heads=3, head_dim=16, dtype=dtype)


def test_int8_heads_carry_their_scale() -> None:
    assert pool(torch.int8).layers[0].shape == (5, 2, 4, 3, 20)
    assert bytes_per_token(30, 3, 64, torch.int8) == 30 * 2 * 3 * 68
    assert bytes_per_token(30, 3, 64, torch.float16) == 30 * 2 * 3 * 128


def test_tokens_are_whole_pages() -> None:
    assert default_tokens(1 << 60, 16) == 16
    assert default_tokens(1, 16) == 65_536
    assert fraction_tokens(0.5, 10_000, 1000, 100, 16) == 32
    with pytest.raises(ConfigError, match="--mem-fraction-static"):
        fraction_tokens(0.5, 10_000, 4000, 100, 16)
