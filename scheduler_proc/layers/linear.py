"""Linear layers: fused from parts, sharded at load, stored and applied by a quantisation method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from kernels.packed_rows import PackedRows
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.parallel.group import Alone, Group

Split = Literal["out", "in", "none"]


class Weight(Protocol):
    """The parameters of a linear layer or a table, as a method stores and applies them. Sizes are this shard's."""

    def load(self, name: str, rows: slice, value: Tensor | PackedRows) -> None:
        """Store the checkpoint's parameter `name` (weight, bias), already cut to this shard, in output rows `rows`."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """What is stored, by name."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_dim] -> [num_tokens, out_dim]`; also takes what the method's norms and gates give."""
        ...

    def apply_from(self, x: Tensor, start: int) -> Tensor:
        """The outputs of apply from `start` on: where a part begins, or anywhere in a dense matrix."""
        ...

    def apply_gated(self, x: Tensor) -> Tensor:
        """`silu(first half) * second half` of apply, as input of another layer of this method."""
        ...

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows `[num_tokens, in_dim]` of the weight in the type of the activations; ids: int64 `[num_tokens]`."""
        ...


class LinearMethod(Protocol):
    """How weights are stored and applied; chosen once for a model."""

    @property
    def takes_packed(self) -> bool:
        """Weights load from a file's packed rows."""
        ...

    @property
    def quantises(self) -> bool:
        """Norms before linear layers give activation rows (kernels/packed.py) rather than floats."""
        ...

    def create(self, out_dim: int, in_dim: int, bias: bool, device: torch.device, dtype: torch.dtype) -> Weight:
        """Allocate a layer's parameters."""
        ...


@dataclass(frozen=True)
class Unquantised:
    """Weights `[out_dim, in_dim]` and biases `[out_dim]` in the model's dtype."""

    kernels: KernelSet
    takes_packed: bool = field(default=False, init=False)
    quantises: bool = field(default=False, init=False)

    def create(self, out_dim: int, in_dim: int, bias: bool, device: torch.device, dtype: torch.dtype) -> DenseWeight:
        weight = torch.empty(out_dim, in_dim, device=device, dtype=dtype)
        return DenseWeight(self.kernels, weight, torch.zeros(out_dim, device=device, dtype=dtype) if bias else None)


@dataclass(frozen=True, eq=False)
class DenseWeight:
    """A dense matrix and its bias."""

    kernels: KernelSet
    weight: Tensor
    bias: Tensor | None

    def load(self, name: str, rows: slice, value: Tensor | PackedRows) -> None:
        self.parameters()[name][rows].copy_(value.dequantise() if isinstance(value, PackedRows) else value)

    def parameters(self) -> dict[str, Tensor]:
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})

    def apply(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)

    def apply_from(self, x: Tensor, start: int) -> Tensor:
        return self.kernels.linear(x, self.weight[start:], None if self.bias is None else self.bias[start:])

    def apply_gated(self, x: Tensor) -> Tensor:
        return self.kernels.gated_linear(x, self.weight, self.bias)

    def lookup(self, ids: Tensor) -> Tensor:
        return self.kernels.embed(self.weight, ids)


@dataclass(frozen=True)
class Part:
    """One checkpoint projection inside a fused layer: `units` blocks of `unit_size` output rows.

    Sharding by output cuts between units (heads). With fewer units than shards, neighbouring shards hold the same unit.
    """

    name: str
    units: int
    unit_size: int

    @property
    def out_dim(self) -> int:
        return self.units * self.unit_size

    def rows(self, group: Group) -> slice:
        """The rows of the whole projection that this process of `group` holds."""
        if self.units >= group.size:
            if self.units % group.size:
                raise ValueError(f"{self.name}: {self.units} units cannot be split over {group.size} processes")
            count = self.units // group.size
            start = group.rank * count
        else:
            if group.size % self.units:
                raise ValueError(f"{self.name}: {self.units} units cannot be spread over {group.size} processes")
            count, start = 1, group.rank * self.units // group.size
        return slice(start * self.unit_size, (start + count) * self.unit_size)


class Linear:
    """`y = x @ weight.T + bias`, possibly several projections of one input fused along the output.

    split `out` cuts every part's output between the processes, `in` cuts the input (each process then makes a partial
    sum, only rank 0's with the bias, and they are added up), `none` keeps the layer whole everywhere.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[Part],
        in_dim: int,
        *,
        bias: bool,
        split: Split,
        method: LinearMethod,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if split == "in" and in_dim % group.size:
            raise ValueError(f"{name}: {in_dim} inputs cannot be split over {group.size} processes")
        self.name = name
        self._parts = tuple(parts)
        self._in_dim = in_dim
        self._bias = bias
        self._split: Split = split
        self._method = method
        self._group = group
        self._joined = group.all_reduce if split == "in" else _as_it_is
        self._source = {p.name: p.rows(group if split == "out" else Alone()) for p in parts}
        sizes = [rows.stop - rows.start for rows in self._source.values()]
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._place = {p.name: slice(end - size, end) for p, size, end in zip(parts, sizes, ends, strict=True)}
        local_in = in_dim // group.size if split == "in" else in_dim
        self._weight = method.create(sum(sizes), local_in, bias, device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """`[num_tokens, in_dim] -> [num_tokens, sum of the parts' out_dim]`, this process's share of those split."""
        return self._joined(self._weight.apply(x))

    def outputs_from(self, x: Tensor, start: int) -> Tensor:
        """The outputs from `start` on, see Weight.apply_from; not of a layer whose input is split."""
        return self._weight.apply_from(x, start)

    def gated(self, x: Tensor) -> Tensor:
        """`silu(first part) * second part` as input of the next layer; two parts of equal size."""
        return self._weight.apply_gated(x)

    @property
    def out_sizes(self) -> tuple[int, ...]:
        """Output size of each part on this process, in the order of the parts."""
        return tuple(rows.stop - rows.start for rows in self._place.values())

    def parameters(self) -> dict[str, Tensor]:
        return {f"{self.name}.{key}": tensor for key, tensor in self._weight.parameters().items()}

    def targets(self, prefix: str) -> dict[str, LoadTarget]:
        """What to load, named `{prefix}.{part}.weight` and `{prefix}.{part}.bias`; without the dot where there is no
        prefix."""
        found: dict[str, LoadTarget] = {}
        for part in self._parts:
            name, weight = f"{prefix}.{part.name}".lstrip("."), (part.out_dim, self._in_dim)
            found[f"{name}.weight"] = LoadTarget(
                weight, partial(self._load_weight, part.name), takes_packed=self._method.takes_packed
            )
            if self._bias:
                found[f"{name}.bias"] = LoadTarget((part.out_dim,), partial(self._load_bias, part.name))
        return found

    def _load_weight(self, part: str, value: Tensor | PackedRows) -> None:
        rows, group = self._source[part], self._group
        if self._split == "in" and group.size > 1:
            value = _columns(value, group)
        self._weight.load("weight", self._place[part], value[rows])

    def _load_bias(self, part: str, tensor: Tensor | PackedRows) -> None:
        assert isinstance(tensor, Tensor)
        if self._split == "in" and self._group.rank:
            # The partial sums are added up: the bias must count once.
            tensor = torch.zeros_like(tensor)
        self._weight.load("bias", self._place[part], tensor[self._source[part]])


def _columns(value: Tensor | PackedRows, group: Group) -> Tensor | PackedRows:
    """This process's share of the input. Raises ValueError where that would cut a packed block."""
    count = value.shape[1] // group.size
    try:
        return value[:, group.rank * count : (group.rank + 1) * count]
    except ValueError as error:
        raise ValueError(f"{error}; --dtype float32 unpacks them, and can be cut anywhere") from error


def _as_it_is(x: Tensor) -> Tensor:
    return x
