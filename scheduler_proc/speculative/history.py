"""The texts of all slots on the device, prompt and answer, for drafters that look into them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.dispatch import KernelSet
from scheduler_proc.plan import Joins
from scheduler_proc.worker.device_slots import DeviceSlots


class TokenHistory:
    """`tokens[slot, i]` is the slot's i-th token; the last one known is at `seq_len[slot]`."""

    def __init__(self, kernels: KernelSet, slots: DeviceSlots, max_len: int) -> None:
        """max_len: tokens of a request at most."""
        self._kernels = kernels
        self._slots = slots
        # The last column is nobody's.
        self.tokens = torch.full(
            (slots.num_slots + 1, max_len + 2), -1, dtype=torch.int32, device=slots.transfer.device
        )

    def join(self, joins: Joins) -> None:
        """What is known of new occupants. A text is uploaded whole: what the prefix cache has of it is not computed."""
        drafting = joins.drafting
        assert drafting is not None, "the plan says nothing of drafts"
        if not len(drafting.texts):
            return
        lens = drafting.text_lens.astype(np.int64)
        starts = np.cumsum(lens) - lens
        slots = np.repeat(joins.slots.astype(np.int64), lens)
        places = np.arange(len(slots)) - np.repeat(starts, lens)
        rows, columns, texts = self._slots.transfer.upload_all(
            (slots, torch.int64), (places, torch.int64), (drafting.texts, torch.int32)
        )
        self.tokens[rows, columns] = texts

    def took(self, rows: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """The slots `rows` have new tokens, int32 [n, m], of which the first counts (int32 [n]; None: all) are valid;
        their seq_len has advanced."""
        self._kernels.append_tokens(self.tokens, self._slots.seq_len, rows, tokens, counts)
