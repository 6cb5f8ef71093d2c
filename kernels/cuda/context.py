"""What the CUDA kernels of a process share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cuda.tuning import Tuner

NUM_TICKETS = 1 << 16
"""How many counters there are: as many outputs can be put together from parts in one launch."""


@dataclass(frozen=True, eq=False)
class Context:
    """Made once for a device; kernels that share one run one after the other, on one stream."""

    device: torch.device
    tuner: Tuner
    tickets: Tensor
    """int32 `[NUM_TICKETS]` on the device: a kernel that counts in them finds zeros and leaves zeros."""


def is_capturing(device: torch.device) -> bool:
    """Whether what is launched now becomes part of a CUDA graph, to run again later on whatever is there then."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def make_context(device: torch.device, tuner: Tuner) -> Context:
    """A context with counters of its own."""
    return Context(device, tuner, torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device))
