"""A plan's arrays on the device: uploaded together, and kept while a plan's rows stay the same."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.logits import AdjustedRows
from scheduler_proc.plan import StepPlan
from scheduler_proc.worker.transfer import Piece, Transfer


@dataclass
class StepArrays:
    """What a step derives from its plan's rows alone. None: every row adds one token, the last one of its slot, and
    samples."""

    version: int
    """The plan's rows_version."""
    rows: Tensor
    """int64 [n]: slots."""
    q_starts: Tensor | None = None
    """int32 [n + 1]: where the tokens of each row begin."""
    host_tokens: Tensor | None = None
    """int32 [num_tokens]: -1 where the token is the slot's last one."""
    sampling: Tensor | None = None
    """int64 [s]: the rows that sample."""
    last: Tensor | None = None
    """int64 [at least s]: the last token of each of those, counted over the step, and then any."""
    leader: int = -1
    """Slot that has what the rows have in common; -1: nothing."""
    common_lens: Tensor | None = None
    """int32 [n]: how many tokens of that each row's context begins with."""
    adjusted: AdjustedRows | None = None
    """Among the sampling rows; made when first needed."""

    @property
    def sampling_rows(self) -> Tensor:
        """int64 [s]: slots that sample."""
        return self.rows if self.sampling is None else self.rows[self.sampling]


def upload_arrays(plan: StepPlan, transfer: Transfer, sizes: Sequence[int] = ()) -> StepArrays:
    """One upload for all that the step needs of its plan. sizes: numbers of rows, ascending, that logits are made for;
    beyond them, as many as there are.
    """
    rows: Piece = (plan.rows, torch.int64)
    if plan.num_decode == len(plan.rows):
        if plan.common_lens is None:
            return StepArrays(plan.rows_version, transfer.upload(*rows))
        slots, lens = transfer.upload_all(rows, (plan.common_lens, torch.int32))
        leader = int(plan.rows[np.flatnonzero(plan.common_lens)[0]])
        return StepArrays(plan.rows_version, slots, leader=leader, common_lens=lens)
    ends = np.cumsum(plan.q_lens)
    starts = np.concatenate((np.zeros(1, ends.dtype), ends))
    own = np.full(plan.num_decode, -1, np.int32)
    last = ends[plan.sample] - 1
    wanted = least_size(sizes, len(last)) or len(last)
    slots, q_starts, host_tokens, sampling, last_tokens = transfer.upload_all(
        rows,
        (starts, torch.int32),
        (np.concatenate((own, plan.tokens)), torch.int32),
        (np.flatnonzero(plan.sample), torch.int64),
        (np.concatenate((last, np.zeros(wanted - len(last), last.dtype))), torch.int64),
    )
    return StepArrays(plan.rows_version, slots, q_starts, host_tokens, sampling, last_tokens)


def least_size(sizes: Sequence[int], num_rows: int) -> int | None:
    """The least of ascending sizes for so many rows; None if they are too many."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None
