"""Tensor-parallel shards: partial results of all ranks add up to the whole layer's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scheduler_proc.layers.linear import Linear, Part, Split, Unquantised
from scheduler_proc.layers.target import Shard
from tests.unit.models.paging import cpu_kernels


def _linear(split: Split, shard: Shard, parts: tuple[Part, ...], weights: dict[str, Tensor]) -> Linear:
    method = Unquantised(cpu_kernels())
    layer = Linear(
        "layer",
        parts,
        12,
        bias=True,
        split=split,
        method=method,
        shard=shard,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    for name, target in layer.targets("p").items():
        assert target.shape == weights[name].shape
        target.load(weights[name])
    return layer


def _weights(parts: tuple[Part, ...]) -> dict[str, Tensor]:
    found = {}
    for part in parts:
        found[f"p.{part.name}.weight"] = torch.randn(part.out_dim, 12)
        found[f"p.{part.name}.bias"] = torch.randn(part.out_dim)
    return found


def _apply(weights: dict[str, Tensor], part: str, x: Tensor) -> Tensor:
    return x @ weights[f"p.{part}.weight"].T + weights[f"p.{part}.bias"]


def test_output_split_keeps_heads_whole_and_replicates_few() -> None:
    parts = (Part("q", 8, 3), Part("k", 2, 3))
    weights, x = _weights(parts), torch.randn(5, 12)
    whole_q, whole_k = _apply(weights, "q", x), _apply(weights, "k", x)
    for rank in range(4):
        layer = _linear("out", Shard(rank, 4), parts, weights)
        assert layer.out_sizes == (6, 3)
        q, k = layer(x).split(layer.out_sizes, dim=-1)
        torch.testing.assert_close(q, whole_q[:, rank * 6 : rank * 6 + 6])
        # Two key heads over four ranks: ranks 0 and 1 share the first.
        torch.testing.assert_close(k, whole_k[:, rank // 2 * 3 : rank // 2 * 3 + 3])


def test_input_split_adds_up() -> None:
    parts = (Part("o", 1, 7),)
    weights, x = _weights(parts), torch.randn(5, 12)
    partial = [_linear("in", Shard(rank, 3), parts, weights)(x[:, rank * 4 : rank * 4 + 4]) for rank in range(3)]
    torch.testing.assert_close(torch.stack(partial).sum(0), _apply(weights, "o", x))


def test_whole_layer_ignores_the_shard() -> None:
    parts = (Part("o", 1, 7),)
    weights, x = _weights(parts), torch.randn(5, 12)
    torch.testing.assert_close(_linear("none", Shard(2, 3), parts, weights)(x), _apply(weights, "o", x))


@pytest.mark.parametrize(
    ("split", "parts", "size"),
    [("out", (Part("q", 6, 2),), 4), ("out", (Part("q", 2, 2),), 3), ("in", (Part("o", 1, 7),), 5)],
)
def test_uneven_splits_are_refused(split: Split, parts: tuple[Part, ...], size: int) -> None:
    with pytest.raises(ValueError, match="cannot be s"):
        _linear(split, Shard(0, size), parts, _weights(parts))
