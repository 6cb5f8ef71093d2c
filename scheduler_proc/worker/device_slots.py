"""The device's share of the running batch: the same slots as on the host, as tensors that steps read and advance."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.step import SlotTensors
from scheduler_proc.plan import Joins, PageUpdates
from scheduler_proc.worker.transfer import Transfer


class SamplingTensors(NamedTuple):
    """Of some rows, in the order of `kernels.sampling.sample`."""

    temperature: Tensor
    """float32"""
    top_k: Tensor
    """int32"""
    top_p: Tensor
    """float32"""
    min_p: Tensor
    """float32"""
    seeds: Tensor
    """int64"""

    def of(self, rows: Tensor | slice) -> SamplingTensors:
        """Those of some of the rows."""
        return SamplingTensors(*(values[rows] for values in self))


class DeviceSlots:
    """Tensors of length num_slots + 1. The host sends who joined and which pages came; the rest happens here.

    The last slot is scratch (kernels/step.py): it has always ended, and what fills up a batch is in it.
    """

    def __init__(self, num_slots: int, max_pages: int, transfer: Transfer, num_stop_ids: int) -> None:
        """num_stop_ids: how many tokens may end a slot at most."""
        device, size = transfer.device, num_slots + 1
        self.transfer = transfer
        self.num_slots = num_slots
        self.page_table = torch.zeros(size, max_pages, dtype=torch.int32, device=device)
        self.seq_len = torch.zeros(size, dtype=torch.int64, device=device)
        """Tokens whose KV is written, or would be had the slot not ended."""
        self.last_token = torch.zeros(size, dtype=torch.int64, device=device)
        self.ended = torch.zeros(size, dtype=torch.bool, device=device)
        """The occupant has drawn one of its stop_ids: the slot does nothing more until the next one joins."""
        self.stop_ids = torch.full((size, num_stop_ids), -1, dtype=torch.int32, device=device)
        self.sampling = SamplingTensors(
            temperature=torch.zeros(size, dtype=torch.float32, device=device),
            top_k=torch.full((size,), -1, dtype=torch.int32, device=device),
            top_p=torch.ones(size, dtype=torch.float32, device=device),
            min_p=torch.zeros(size, dtype=torch.float32, device=device),
            seeds=torch.zeros(size, dtype=torch.int64, device=device),
        )
        self.ended[num_slots] = True
        self.tensors = SlotTensors(self.seq_len, self.last_token, self.ended, self.stop_ids, self.page_table)

    @property
    def scratch(self) -> int:
        """The slot that nobody has."""
        return self.num_slots

    def join(self, joins: Joins) -> None:
        """New occupants of slots."""
        num, width = joins.stop_ids.shape
        ends = np.full((num, self.stop_ids.shape[1]), -1, np.int32)
        ends[:, :width] = joins.stop_ids
        slots, context_lens, stop_ids, *sampling = self.transfer.upload_all(
            (joins.slots, torch.int64),
            (joins.context_lens, torch.int64),
            (ends, torch.int32),
            (joins.temperature, torch.float32),
            (joins.top_k, torch.int32),
            (joins.top_p, torch.float32),
            (joins.min_p, torch.float32),
            (joins.seeds, torch.int64),
        )
        self.seq_len[slots] = context_lens
        self.stop_ids[slots] = stop_ids
        for values, new in zip(self.sampling, sampling, strict=True):
            values[slots] = new
        self.ended.index_fill_(0, slots, False)

    def set_pages(self, updates: PageUpdates) -> None:
        """New page-table entries."""
        slots, columns, pages = self.transfer.upload_all(
            (updates.slots, torch.int64), (updates.columns, torch.int64), (updates.pages, torch.int32)
        )
        self.page_table[slots, columns] = pages
