"""The device's share of the running batch: the same slots as on the host, as tensors that steps read and advance."""

from __future__ import annotations

import numpy as np
import torch

from scheduler_proc.plan import Joins, PageUpdates


class DeviceSlots:
    """Tensors of length num_slots. The host sends who joined and which pages came; the rest happens here."""

    def __init__(self, num_slots: int, max_pages: int, device: torch.device) -> None:
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self.seq_len = torch.zeros(num_slots, dtype=torch.int64, device=device)
        """Tokens whose KV is written."""
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.top_p = torch.ones(num_slots, dtype=torch.float32, device=device)
        self.top_k = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.min_p = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._device = device

    def upload(self, array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a host array on the device."""
        return torch.tensor(array, dtype=dtype, device=self._device)

    def join(self, joins: Joins) -> None:
        """New occupants of slots."""
        slots = self.upload(joins.slots, torch.int64)
        self.seq_len[slots] = self.upload(joins.context_lens, torch.int64)
        self.temperature[slots] = self.upload(joins.temperature, torch.float32)
        self.top_p[slots] = self.upload(joins.top_p, torch.float32)
        self.top_k[slots] = self.upload(joins.top_k, torch.int32)
        self.min_p[slots] = self.upload(joins.min_p, torch.float32)
        self.seeds[slots] = self.upload(joins.seeds, torch.int64)

    def set_pages(self, updates: PageUpdates) -> None:
        """New page-table entries."""
        slots = self.upload(updates.slots, torch.int64)
        columns = self.upload(updates.columns, torch.int64)
        self.page_table[slots, columns] = self.upload(updates.pages, torch.int32)
