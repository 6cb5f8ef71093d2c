"""Where drafts of some rows may go: the places behind their texts."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import KernelSet
from kernels.places import DraftPlaces, Passes
from kernels.speculative import VerifyLimits
from scheduler_proc.worker.device_slots import DeviceSlots
from scheduler_proc.worker.forward import Pages

MOST_PLACES = 64 * 16
"""Behind a row's text, that any number of steps and beams writes to."""


class Room:
    """Of the slots `rows`, for one round of drafts."""

    def __init__(self, slots: DeviceSlots, pages: Pages, rows: Tensor, longest: int, limits: VerifyLimits) -> None:
        """rows: int64 [n]; longest: tokens of a row at most."""
        self._slots, self._pages, self._limits = slots, pages, limits
        self.rows, self.page_size = rows, pages.page_size
        self.longest = min(longest + MOST_PLACES, slots.page_table.shape[1] * pages.page_size)
        """Places of a row at most: as many as its page table has room for."""

    def places(self, kernels: KernelSet, passes: Passes) -> DraftPlaces:
        """What the passes of this round read."""
        width = -(-self.longest // self.page_size)
        slots, scratch = self._slots.tensors, self._pages.scratch_location
        return kernels.draft_places(self.rows, passes, slots, self._limits, self.page_size, scratch, width)
