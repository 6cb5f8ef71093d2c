"""Changing logits before a token is drawn: penalties, bias, and ends that may not come yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PenaltyTable:
    """What has been said before, for those that are penalised for it; one entry each."""

    repetition: Tensor
    """float32 [entries], > 0; 1 = off"""
    presence: Tensor
    """float32 [entries]; 0 = off"""
    frequency: Tensor
    """float32 [entries]; 0 = off"""
    in_prompt: Tensor
    """bool [entries, vocab]: tokens of the prompt."""
    output_counts: Tensor
    """int32 [entries, vocab]: how often each token is in the output."""


@dataclass(frozen=True, eq=False)
class EditTable:
    """Single tokens whose logits change; one entry for each who wants that. Padding changes no bit of any logit."""

    bias_ids: Tensor
    """int64 [entries, most biases]; padded with 0."""
    bias_values: Tensor
    """float32 [entries, most biases]; padded with -0.0."""
    end_ids: Tensor
    """int64 [entries, most ends]; padded with any of the entry's own, or with 0 where it has none (and min_lens 0)."""
    min_lens: Tensor
    """int64 [entries]: length below which no end may be drawn."""


@dataclass(frozen=True, eq=False)
class AdjustedRows:
    """Which rows of a batch have an entry in which table; int64 tensors, no row twice in one table."""

    penalty_rows: Tensor
    penalty_entries: Tensor
    edit_rows: Tensor
    edit_entries: Tensor


def adjust_logits(
    logits: Tensor, kv_lens: Tensor, penalties: PenaltyTable, edits: EditTable, adjusted: AdjustedRows
) -> None:
    """Change the logits of some rows in place; the other rows stay as they are.

    logits: `[rows, vocab]`, float32 or, computed in float32 and rounded after each of the tables, a shorter type;
    kv_lens: int64 `[rows]`, tokens of prompt and output before the one to be drawn.
    One after the other, for a token j with logit x that is c times in the output:

    1. repetition: if j is in the prompt or the output, x becomes x / repetition where x > 0, else x * repetition
       (Keskar et al., "CTRL", 2019; prompt tokens count, as in Hugging Face's processor of that name);
    2. x - c * frequency - (presence if c > 0 else 0) (OpenAI's API reference: output tokens only);
    3. x + bias of j (OpenAI's logit_bias);
    4. -inf where kv_lens < min_lens, for each of the row's ends.

    A NaN stays a NaN, so that whoever draws still sees it.
    """
    if len(adjusted.penalty_rows):
        _penalise(logits, penalties, adjusted.penalty_rows, adjusted.penalty_entries)
    if len(adjusted.edit_rows):
        _edit(logits, kv_lens, edits, adjusted.edit_rows, adjusted.edit_entries)


def mask_logits(logits: Tensor, bitmask: Tensor, rows: Tensor, entries: Tensor) -> None:
    """Make -inf, in place, what a grammar forbids.

    logits: any float dtype `[rows, vocab]`; bitmask: int32 `[entries, ceil(vocab / 32)]`, where bit `j % 32` of word
    `j // 32` says that token j is allowed; rows, entries: int64 `[n]`, which row takes which mask, no row twice. A NaN
    stays a NaN, so that whoever draws still sees it.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    words = bitmask[entries][:, token // 32]
    forbidden = (words >> (token % 32).to(torch.int32)) & 1 == 0
    values = logits[rows]
    logits[rows] = values.masked_fill(forbidden & ~values.isnan(), -torch.inf)


def _penalise(logits: Tensor, table: PenaltyTable, rows: Tensor, entries: Tensor) -> None:
    # What was said is a small part of the vocabulary; finding it is a wait on a GPU, but there is none on a CPU.
    seen = table.in_prompt.index_select(0, entries)
    seen.logical_or_(table.output_counts.index_select(0, entries))
    which, tokens = seen.nonzero(as_tuple=True)
    row, entry = rows[which], entries[which]
    x, repetition, counts = logits[row, tokens].float(), table.repetition[entry], table.output_counts[entry, tokens]
    x = torch.where(x > 0, x / repetition, x * repetition)
    x.sub_(counts * table.frequency[entry]).sub_((counts > 0) * table.presence[entry])
    logits[row, tokens] = x.to(logits.dtype)


def _edit(logits: Tensor, kv_lens: Tensor, table: EditTable, rows: Tensor, entries: Tensor) -> None:
    if logits.dtype != torch.float32:
        wide = logits[rows].float()
        _edit(wide, kv_lens[rows], table, torch.arange(len(rows), device=rows.device), entries)
        logits[rows] = wide.to(logits.dtype)
        return
    column = rows.unsqueeze(1)
    # Accumulates, because padding may name a token that has a bias of its own.
    logits.index_put_((column, table.bias_ids[entries]), table.bias_values[entries], accumulate=True)
    ends = table.end_ids[entries]
    values = logits[column, ends]
    too_early = (kv_lens[rows] < table.min_lens[entries]).unsqueeze(1)
    logits[column, ends] = values.masked_fill(too_early & ~values.isnan(), -torch.inf)
