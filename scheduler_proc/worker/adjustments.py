"""The device's state of occupants whose logits are changed: what they have said, their biases, their ends.

Few slots need any of it, and what was said is as wide as the vocabulary, so it is not kept per slot: an occupant that
needs it takes an entry of a table that grows, and the entry is free again once the slot's next occupant joins.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from kernels.speculative import Nodes
from scheduler_proc.plan import Adjustment, Joins
from scheduler_proc.worker.transfer import Transfer


class Adjustments:
    """Tables for `kernels.logits.adjust_logits`, and which slot has which of their entries."""

    def __init__(self, num_slots: int, vocab_size: int, transfer: Transfer) -> None:
        device = transfer.device
        self.penalties = PenaltyTable(
            repetition=torch.ones(0, device=device),
            presence=torch.zeros(0, device=device),
            frequency=torch.zeros(0, device=device),
            in_prompt=torch.zeros(0, vocab_size, dtype=torch.bool, device=device),
            output_counts=torch.zeros(0, vocab_size, dtype=torch.int32, device=device),
        )
        self.edits = EditTable(
            bias_ids=torch.zeros(0, 0, dtype=torch.int64, device=device),
            bias_values=torch.zeros(0, 0, device=device),
            end_ids=torch.zeros(0, 0, dtype=torch.int64, device=device),
            min_lens=torch.zeros(0, dtype=torch.int64, device=device),
        )
        self._vocab_size = vocab_size
        self._transfer = transfer
        self._penalty_entries = _Entries(num_slots)
        self._edit_entries = _Entries(num_slots)

    def join(self, joins: Joins) -> None:
        """Forget the slots' last occupants and take in the new ones; told again, it comes to the same."""
        self._penalty_entries.release(joins.slots)
        self._edit_entries.release(joins.slots)
        for adjustment in joins.adjustments:
            if _has_penalties(adjustment):
                self._set_penalties(adjustment)
            if len(adjustment.bias_ids) or _may_end_too_early(adjustment):
                self._set_edits(adjustment)

    def adjusts(self, slots: np.ndarray) -> np.ndarray:
        """bool [rows]: which of these slots have an entry anywhere; slots: int32 [rows]."""
        return (self._penalty_entries.of[slots] >= 0) | (self._edit_entries.of[slots] >= 0)

    def rows_of(self, slots: np.ndarray) -> AdjustedRows:
        """Where in the tables a batch of rows finds itself; slots: int32 [rows], no slot twice."""
        penalty_entries = self._penalty_entries.of[slots]
        edit_entries = self._edit_entries.of[slots]
        penalty_rows = np.flatnonzero(penalty_entries >= 0)
        edit_rows = np.flatnonzero(edit_entries >= 0)
        return AdjustedRows(
            penalty_rows=self._upload(penalty_rows, torch.int64),
            penalty_entries=self._upload(penalty_entries[penalty_rows], torch.int64),
            edit_rows=self._upload(edit_rows, torch.int64),
            edit_entries=self._upload(edit_entries[edit_rows], torch.int64),
        )

    def count(self, tokens: Tensor, adjusted: AdjustedRows) -> None:
        """The rows of a batch have drawn `tokens` (int64 [rows]): part of their output from now on."""
        entries = adjusted.penalty_entries
        if len(entries):
            self.penalties.output_counts[entries, tokens[adjusted.penalty_rows]] += 1

    def of_nodes(self, adjusted: AdjustedRows, nodes: Nodes) -> tuple[PenaltyTable, AdjustedRows]:
        """The same for all nodes of the rows, one after the other: what is on a node's way from node 0 counts as said.

        Returns a table of penalties of their own, and where all nodes find themselves in it and in `edits`.
        """
        size = nodes.usable.shape[1]
        column = torch.arange(size, device=adjusted.edit_rows.device)
        table, rows = self.penalties, adjusted.penalty_rows
        entries = adjusted.penalty_entries.repeat_interleave(size)
        said = table.output_counts[entries].view(-1, size, self._vocab_size)
        seen = column[1:] <= column.unsqueeze(1) if nodes.visible is None else nodes.visible[rows][:, :, 1:]
        drafted = nodes.drafts.tokens[rows].clamp(min=0).unsqueeze(1).expand(-1, size, -1)
        said.scatter_add_(2, drafted, seen.to(torch.int32).expand_as(drafted))
        penalties = PenaltyTable(
            table.repetition[entries],
            table.presence[entries],
            table.frequency[entries],
            table.in_prompt[entries],
            said.view(-1, self._vocab_size),
        )
        return penalties, AdjustedRows(
            penalty_rows=(rows.unsqueeze(1) * size + column).flatten(),
            penalty_entries=torch.arange(len(entries), device=entries.device),
            edit_rows=(adjusted.edit_rows.unsqueeze(1) * size + column).flatten(),
            edit_entries=adjusted.edit_entries.repeat_interleave(size),
        )

    def count_all(self, tokens: Tensor, counts: Tensor, adjusted: AdjustedRows) -> None:
        """As `count`, where the rows have several tokens: int32 [n, m], of which the first counts (int32 [n]) are
        valid."""
        entries = adjusted.penalty_entries
        if len(entries):
            own = tokens[adjusted.penalty_rows].long().clamp(min=0)
            valid = torch.arange(own.shape[1], device=own.device) < counts[adjusted.penalty_rows].unsqueeze(1)
            index = (entries.unsqueeze(1).expand_as(own), own)
            self.penalties.output_counts.index_put_(index, valid.to(torch.int32), accumulate=True)

    def _set_penalties(self, adjustment: Adjustment) -> None:
        entries = self._penalty_entries
        if entries.is_full:
            self.penalties = _grown_penalties(self.penalties, entries.next_capacity)
            entries.add_capacity()
        entry = entries.take(adjustment.slot)
        table = self.penalties
        table.repetition[entry] = adjustment.repetition_penalty
        table.presence[entry] = adjustment.presence_penalty
        table.frequency[entry] = adjustment.frequency_penalty
        table.in_prompt[entry] = False
        table.in_prompt[entry, self._upload(adjustment.prompt_ids, torch.int64)] = True
        tokens, counts = np.unique(adjustment.output_ids, return_counts=True)
        table.output_counts[entry] = 0
        table.output_counts[entry, self._upload(tokens, torch.int64)] = self._upload(counts, torch.int32)

    def _set_edits(self, adjustment: Adjustment) -> None:
        # A model's configuration may name an end that is not in its vocabulary.
        end_ids = adjustment.end_ids[adjustment.end_ids < self._vocab_size]
        num_biases, num_ends = len(adjustment.bias_ids), len(end_ids)
        entries, table = self._edit_entries, self.edits
        num_entries = entries.next_capacity if entries.is_full else entries.capacity
        if entries.is_full or num_biases > table.bias_ids.shape[1] or num_ends > table.end_ids.shape[1]:
            table = self.edits = _grown_edits(table, num_entries, num_biases, num_ends)
        if entries.is_full:
            entries.add_capacity()
        entry = entries.take(adjustment.slot)
        table.bias_ids[entry] = 0
        table.bias_ids[entry, :num_biases] = self._upload(adjustment.bias_ids, torch.int64)
        table.bias_values[entry] = -0.0
        table.bias_values[entry, :num_biases] = self._upload(adjustment.bias_values, torch.float32)
        table.end_ids[entry] = int(end_ids[0]) if num_ends else 0
        table.end_ids[entry, :num_ends] = self._upload(end_ids, torch.int64)
        table.min_lens[entry] = adjustment.min_len if num_ends else 0

    def _upload(self, array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return self._transfer.upload(array, dtype)


class _Entries:
    """Which slot has which entry of one table; `capacity` entries there are."""

    def __init__(self, num_slots: int) -> None:
        self.of = np.full(num_slots, -1, np.int64)
        """[num_slots]: the slot's entry, -1 = none."""
        self.capacity = 0
        self._free: list[int] = []

    @property
    def is_full(self) -> bool:
        return not self._free

    @property
    def next_capacity(self) -> int:
        """What the table grows to when it is full."""
        return min(max(4, 2 * self.capacity), len(self.of))

    def add_capacity(self) -> None:
        """The table has grown."""
        capacity = self.next_capacity
        self._free.extend(range(capacity - 1, self.capacity - 1, -1))
        self.capacity = capacity

    def take(self, slot: int) -> int:
        self.of[slot] = self._free.pop()
        return int(self.of[slot])

    def release(self, slots: np.ndarray) -> None:
        entries = self.of[slots]
        self._free.extend(entries[entries >= 0].tolist())
        self.of[slots] = -1


def _has_penalties(adjustment: Adjustment) -> bool:
    penalties = (adjustment.repetition_penalty, adjustment.presence_penalty, adjustment.frequency_penalty)
    return penalties != (1.0, 0.0, 0.0)


def _may_end_too_early(adjustment: Adjustment) -> bool:
    # Where there are no penalties, what is known is not told.
    return len(adjustment.end_ids) > 0 and adjustment.min_len > len(adjustment.prompt_ids) + len(adjustment.output_ids)


def _grown_penalties(table: PenaltyTable, num_entries: int) -> PenaltyTable:
    vocab = table.in_prompt.shape[1]
    return PenaltyTable(
        repetition=_grown(table.repetition, 1.0, num_entries),
        presence=_grown(table.presence, 0.0, num_entries),
        frequency=_grown(table.frequency, 0.0, num_entries),
        in_prompt=_grown(table.in_prompt, False, num_entries, vocab),
        output_counts=_grown(table.output_counts, 0, num_entries, vocab),
    )


def _grown_edits(table: EditTable, num_entries: int, num_biases: int, num_ends: int) -> EditTable:
    num_biases = max(num_biases, table.bias_ids.shape[1])
    # New columns repeat what pads an entry, which may be an end of its own.
    ends = table.end_ids
    end_ids = _grown(ends, 0, num_entries, max(num_ends, ends.shape[1]))
    if ends.shape[1]:
        end_ids[: len(ends), ends.shape[1] :] = ends[:, :1]
    return EditTable(
        bias_ids=_grown(table.bias_ids, 0, num_entries, num_biases),
        bias_values=_grown(table.bias_values, -0.0, num_entries, num_biases),
        end_ids=end_ids,
        min_lens=_grown(table.min_lens, 0, num_entries),
    )


def _grown(tensor: Tensor, fill: float, *shape: int) -> Tensor:
    """A larger tensor that begins with this one."""
    grown = tensor.new_full(shape, fill)
    grown[tuple(slice(size) for size in tensor.shape)] = tensor
    return grown
