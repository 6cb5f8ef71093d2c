"""Where drafts of some rows may go: the places behind their texts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.pages import pages_of
from kernels.speculative import VerifyLimits
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages

MOST_PLACES = 64 * 16
"""Behind a row's text, that any number of steps and beams writes to."""


class Room:
    """Of the slots `rows`, for one round of drafts."""

    def __init__(self, slots: DeviceSlots, pages: Pages, rows: Tensor, longest: int, limits: VerifyLimits) -> None:
        """rows: int64 [n]; longest: tokens of a row at most."""
        self._slots, self._pages, self.rows = slots, pages, rows
        self.page_size = pages.page_size
        self.longest = min(longest + MOST_PLACES, slots.page_table.shape[1] * pages.page_size)
        """Places of a row at most: as many as its page table has room for."""
        self.context = slots.seq_len[rows]
        """int64 [n]: tokens that are in pages, the place of each row's last token."""
        # The last token of a full answer needs no place.
        self._end = limits.full_lens[rows] - 1
        self.active = (self.context < self._end) & ~slots.ended[rows]
        """bool [n]: rows that have any."""
        self.table = slots.page_table[rows, : -(-self.longest // self.page_size)]
        """int32 [n, width]: their pages."""

    def locations(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the places int64 [n, m] rows may write to, and where those are; others are nobody's."""
        page_size = self.page_size
        usable = self.active.unsqueeze(1) & (places < self._end.unsqueeze(1))
        page = pages_of(self._slots.page_table, self.rows, places, page_size)
        return usable, torch.where(usable, page * page_size + places % page_size, self._pages.scratch_location)
