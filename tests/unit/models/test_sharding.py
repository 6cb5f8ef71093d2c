"""Layers cut over a group: partial results of all ranks add up to the whole layer's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.packed_rows import PackedRows
from scheduler_proc.layers.linear import Linear, Part, Split, Unquantised
from scheduler_proc.layers.vocabulary import SplitTable
from scheduler_proc.parallel.group import Group
from tests.unit.models.paging import cpu_kernels


@dataclass(frozen=True)
class Share:
    """One rank of a group that tells the others nothing and hears nothing from them."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        """Nothing is heard."""

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        """There is nothing to leave."""


def _linear(split: Split, group: Group, parts: tuple[Part, ...], weights: dict[str, Tensor]) -> Linear:
    method = Unquantised(cpu_kernels())
    layer = Linear(
        "layer",
        parts,
        12,
        bias=True,
        split=split,
        method=method,
        group=group,
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
        layer = _linear("out", Share(rank, 4), parts, weights)
        assert layer.out_sizes == (6, 3)
        q, k = layer(x).split(layer.out_sizes, dim=-1)
        torch.testing.assert_close(q, whole_q[:, rank * 6 : rank * 6 + 6])
        # Two key heads over four ranks: ranks 0 and 1 share the first.
        torch.testing.assert_close(k, whole_k[:, rank // 2 * 3 : rank // 2 * 3 + 3])


def test_input_split_adds_up() -> None:
    parts = (Part("o", 1, 7),)
    weights, x = _weights(parts), torch.randn(5, 12)
    partial = [_linear("in", Share(rank, 3), parts, weights)(x[:, rank * 4 : rank * 4 + 4]) for rank in range(3)]
    torch.testing.assert_close(torch.stack(partial).sum(0), _apply(weights, "o", x))


def test_whole_layer_ignores_the_shard() -> None:
    parts = (Part("o", 1, 7),)
    weights, x = _weights(parts), torch.randn(5, 12)
    torch.testing.assert_close(_linear("none", Share(2, 3), parts, weights)(x), _apply(weights, "o", x))


@pytest.mark.parametrize(
    ("split", "parts", "size"),
    [("out", (Part("q", 6, 2),), 4), ("out", (Part("q", 2, 2),), 3), ("in", (Part("o", 1, 7),), 5)],
)
def test_uneven_splits_are_refused(split: Split, parts: tuple[Part, ...], size: int) -> None:
    with pytest.raises(ValueError, match="cannot be s"):
        _linear(split, Share(0, size), parts, _weights(parts))


def test_a_cut_through_a_packed_block_is_refused_with_what_to_do() -> None:
    method = Unquantised(cpu_kernels())
    layer = Linear(
        "layer",
        (Part("o", 1, 2),),
        256,
        bias=False,
        split="in",
        method=method,
        group=Share(1, 2),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    packed = PackedRows("Q4_K", torch.zeros(2, 144, dtype=torch.uint8), 256)
    with pytest.raises(ValueError, match=r"block; --dtype float32 unpacks"):
        layer.targets("p")["p.o.weight"].load(packed)


def test_shares_of_a_table_are_filled_up_with_zeros() -> None:
    rows, shares = torch.arange(1.0, 23).repeat(32, 1).T.contiguous(), []
    ids, own = torch.tensor([0, 15, 16, 21]), ([1.0, 16, 0, 0], [0.0, 0, 17, 22])
    for rank in range(2):
        table = SplitTable(
            "t",
            22,
            32,
            method=Unquantised(cpu_kernels()),
            group=Share(rank, 2),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        (target,) = table.targets().values()
        assert target.shape == (22, 32)
        target.load(rows)
        torch.testing.assert_close(table.lookup(ids), torch.tensor(own[rank]).repeat(32, 1).T)
        shares += table.parameters().values()
    whole = torch.cat(shares)
    torch.testing.assert_close(whole[:22], rows)
    assert whole.shape == (32, 32)
    assert not whole[22:].any()
