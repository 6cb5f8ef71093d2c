"""Tables with a row for every token: the embedding and the output projection, often one and the same."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.packed_rows import PackedRows
from scheduler_proc.layers.linear import LinearMethod
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.parallel.group import Group

_ROW_MULTIPLE = 8
"""Rows of a share of a table: the logits of bfloat16 rows then begin at multiples of 16 bytes."""


class Table:
    """A table `[vocab_size, hidden_size]`, whole."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        method: LinearMethod,
        device: torch.device,
        dtype: torch.dtype,
        rows: int | None = None,
    ) -> None:
        """rows: to allocate, where it is not the whole table."""
        self._name = name
        self._shape = (vocab_size, hidden_size)
        self._takes_packed = method.takes_packed
        self._weight = method.create(vocab_size if rows is None else rows, hidden_size, False, device, dtype)

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows `[num_tokens, hidden_size]` of the table in the type of the activations; ids: int64 `[num_tokens]`."""
        return self._weight.lookup(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab_size]` from hidden states `[rows, hidden_size]`, in their type; float32 where it is packed."""
        return self._weight.apply(hidden)

    def parameters(self) -> dict[str, Tensor]:
        return {f"{self._name}.{key}": tensor for key, tensor in self._weight.parameters().items()}

    def targets(self) -> dict[str, LoadTarget]:
        target = LoadTarget(self._shape, self._load, takes_packed=self._takes_packed)
        return {f"{self._name}.weight": target}

    def _load(self, value: Tensor | PackedRows) -> None:
        self._weight.load("weight", slice(0, self._shape[0]), value)


class SplitTable(Table):
    """This rank's rows of a table that is split over a group; rows of zeros fill up the last shares."""

    def __init__(
        self,
        name: str,
        vocab_size: int,
        hidden_size: int,
        *,
        method: LinearMethod,
        group: Group,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        rows = -(-vocab_size // (group.size * _ROW_MULTIPLE)) * _ROW_MULTIPLE
        super().__init__(name, vocab_size, hidden_size, method=method, device=device, dtype=dtype, rows=rows)
        self._group = group
        self._num_rows = rows
        self._first = group.rank * rows

    def lookup(self, ids: Tensor) -> Tensor:
        own = ids - self._first
        is_elsewhere = (own < 0) | (own >= self._num_rows)
        found = self._weight.lookup(own.masked_fill_(is_elsewhere, 0))
        return self._group.all_reduce(found.masked_fill_(is_elsewhere.unsqueeze(1), 0))

    def logits(self, hidden: Tensor) -> Tensor:
        # Every rank gets all of them, though only rank 0's draw counts: one collective that knows no ranks, so that
        # all capture the same graph and run the same code.
        every = self._group.all_gather(self._weight.apply(hidden), 1)
        return every[:, : self._shape[0]].contiguous()

    def _load(self, value: Tensor | PackedRows) -> None:
        own = value[self._first : self._first + self._num_rows]
        missing = self._num_rows - own.shape[0]
        if missing:
            data = own.data if isinstance(own, PackedRows) else own
            padded = F.pad(data, (0, 0, 0, missing))
            own = replace(own, data=padded) if isinstance(own, PackedRows) else padded
        self._weight.load("weight", slice(0, self._num_rows), own)
