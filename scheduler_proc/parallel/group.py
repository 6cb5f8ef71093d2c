"""The processes that compute one model together, and what they tell each other inside a step.

Collectives are called by all ranks in the same order and with the same shapes. On CUDA they are NCCL's, enqueued on the
current stream: nothing waits on the host, so a graph can be captured around them. On the CPU they are gloo's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

COLLECTIVE_TIMEOUT_S = 60.0
"""A collective that somebody does not join for so long fails."""
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Unless the user says otherwise: all ranks are on this host, and nobody else shall find an open port."""


class Group(Protocol):
    """`size` processes, this one being number `rank`. Rank 0 plans and samples."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up all ranks' x, in place; returns x, which is contiguous."""
        ...

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' x (of equal shape) one after the other along `dim`."""
        ...

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x with that of rank 0."""
        ...

    def least(self, value: int) -> int:
        """The least of all ranks' values. For the start only: it waits on the host for whoever still loads."""
        ...

    def close(self) -> None:
        """Leave the group."""
        ...


@dataclass(frozen=True)
class Alone:
    """A group of one: nobody to talk to."""

    rank: int = field(default=0, init=False)
    size: int = field(default=1, init=False)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        """It is rank 0's already."""

    def least(self, value: int) -> int:
        return value

    def close(self) -> None:
        """Nothing to leave."""


class Distributed:
    """A group over torch.distributed; at most one in a process."""

    def __init__(self, rank: int, size: int, meeting: Path, device: torch.device, start_timeout_s: float) -> None:
        """Wait for the others and connect to them.

        meeting: a file in a private directory, not there yet, through which the ranks find each other. device: where
        the tensors of collectives are; a CUDA device becomes this process's current one. start_timeout_s: how long
        the others may take to come, here and in `least`. Raises RuntimeError if they do not.
        """
        for name, value in _LOOPBACK.items():
            os.environ.setdefault(name, value)
        self.rank, self.size = rank, size
        self._num_meetings = 0
        self._store = dist.FileStore(str(meeting), size)
        self._store.set_timeout(timedelta(seconds=start_timeout_s))
        self._gather: Callable[[Tensor, Tensor], object] = getattr(
            dist, "all_gather_single", dist.all_gather_into_tensor
        )
        on_cuda = device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(device)
        # Connecting has the collectives' patience, not the start's: nobody begins before all are there.
        self.least(0)
        dist.init_process_group(
            "nccl" if on_cuda else "gloo",
            store=self._store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
            device_id=device if on_cuda else None,
        )

    def all_reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        gathered = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._gather(gathered, x)
        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)

    def broadcast(self, x: Tensor) -> None:
        dist.broadcast(x, 0)

    def least(self, value: int) -> int:
        # Through the file, not by a collective: a large model loads for longer than a collective may take.
        self._num_meetings += 1
        self._store.set(f"least/{self._num_meetings}/{self.rank}", str(value))
        return min(int(self._store.get(f"least/{self._num_meetings}/{rank}")) for rank in range(self.size))

    def close(self) -> None:
        dist.destroy_process_group()
