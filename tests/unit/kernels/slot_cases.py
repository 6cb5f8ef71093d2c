"""Running batches for the tests of where steps begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from kernels.step import SlotTensors, StepInputs

UNTOUCHED = -7
"""What buffers hold before a step."""


def make_slots(
    seq_lens: Sequence[int],
    ended: Sequence[int],
    page_size: int,
    width: int,
    stop_ids: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
) -> SlotTensors:
    """Slots of these lengths, and the scratch slot behind them; ended: the numbers of those that have."""
    num_slots = len(seq_lens)
    flags = torch.zeros(num_slots + 1, dtype=torch.bool)
    flags[[*ended, num_slots]] = True
    pages = torch.arange((num_slots + 1) * width, dtype=torch.int32).view(num_slots + 1, width) * 3 + 100
    widest = max((len(ids) for ids in stop_ids or ()), default=0)
    stops = torch.full((num_slots + 1, widest), -1, dtype=torch.int32)
    for slot, ids in enumerate(stop_ids or ()):
        stops[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return SlotTensors(
        torch.tensor([*seq_lens, 0], dtype=torch.int64, device=device),
        torch.tensor([*range(50, 50 + num_slots), 0], dtype=torch.int64, device=device),
        flags.to(device),
        stops.to(device),
        pages.to(device),
    )


def copy_of(slots: SlotTensors) -> SlotTensors:
    return SlotTensors(*(getattr(slots, field.name).clone() for field in fields(SlotTensors)))


def empty_inputs(num_tokens: int, num_rows: int, width: int, device: torch.device | str = "cpu") -> StepInputs:
    def vector(size: int) -> Tensor:
        return torch.full((size,), UNTOUCHED, dtype=torch.int64, device=device)

    table = torch.full((num_rows, width), UNTOUCHED, dtype=torch.int32, device=device)
    return StepInputs(vector(num_tokens), vector(num_tokens), vector(num_tokens), vector(num_rows), table)
