"""Where a step begins and ends on the device: its inputs from the slots, and what its tokens change in them.

Slots are rows of tensors; the last slot, `num_slots`, is scratch: it has always ended, and rows that only fill up a
batch are in it. A slot whose occupant has ended does nothing any more until another one joins: it writes its keys and
values to a scratch place, and its tokens are 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 16
"""Numbers."""


@dataclass(frozen=True, eq=False)
class SlotTensors:
    """The running batch on the device."""

    seq_len: Tensor
    """int64 [num_slots + 1]: tokens whose keys and values are written, or would be had the slot not ended."""
    last_token: Tensor
    """int64 [num_slots + 1]"""
    ended: Tensor
    """bool [num_slots + 1]"""
    stop_ids: Tensor
    """int32 [num_slots + 1, widest]: tokens that end the slot, -1 where it has fewer."""
    page_table: Tensor
    """int32 [num_slots + 1, max_pages]"""


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a forward pass reads; of num_tokens tokens in n rows."""

    tokens: Tensor
    """int64 [num_tokens]"""
    positions: Tensor
    """int64 [num_tokens]"""
    locations: Tensor
    """int64 [num_tokens]: `page * page_size + offset` where the token's key and value go."""
    kv_lens: Tensor
    """int64 [n]: the rows' lengths with this step's tokens."""
    page_table: Tensor
    """int32 [n, width], no wider than the slots' and wide enough for the longest row; what lies beyond a row's length
    is arbitrary."""

    def first(self, num_tokens: int, num_rows: int) -> StepInputs:
        """The same memory, for a step of fewer tokens and rows."""
        return StepInputs(
            self.tokens[:num_tokens],
            self.positions[:num_tokens],
            self.locations[:num_tokens],
            self.kv_lens[:num_rows],
            self.page_table[:num_rows],
        )


def empty_inputs(num_tokens: int, num_rows: int, width: int, device: torch.device) -> StepInputs:
    """Room for what a forward pass reads; vectors begin where wide loads may, so that kernels are compiled once."""
    room = (num_tokens // _ALIGNED + 1) * _ALIGNED
    tokens, positions, locations = torch.empty(3, room, dtype=torch.int64, device=device)[:, :num_tokens].unbind(0)
    kv_lens = torch.empty(num_rows, dtype=torch.int64, device=device)
    table = torch.empty(num_rows, width, dtype=torch.int32, device=device)
    return StepInputs(tokens, positions, locations, kv_lens, table)


def zeroed_inputs(num_tokens: int, num_rows: int, width: int, device: torch.device) -> StepInputs:
    """`empty_inputs` that may be read before they are filled."""
    inputs = empty_inputs(num_tokens, num_rows, width, device)
    for tensor in vars(inputs).values():
        tensor.zero_()
    return inputs


def step_inputs(
    rows: Tensor,
    q_starts: Tensor | None,
    host_tokens: Tensor | None,
    slots: SlotTensors,
    page_size: int,
    scratch_location: int,
    empties_ended: bool,
    out: StepInputs,
) -> None:
    """Fill `out` from the slots and advance their seq_len by each row's tokens.

    rows: int64 [n], no slot twice but the scratch slot; q_starts: int32 [n + 1], where the tokens of each row begin, or
    None if each row adds one token; host_tokens: int32 [num_tokens], -1 where the token is the slot's last one; None if
    all are. A slot that has ended has token 0 at position 0, which goes to scratch_location, and with empties_ended a
    length of 0 (else its length, for attention that was planned with the lengths that the host knows).
    """
    ended = slots.ended[rows]
    context = slots.seq_len[rows]
    if q_starts is None:
        row_of_token, offsets = None, None
        positions, lengths, skips, token_rows = context, context + 1, ended, rows
    else:
        starts = q_starts.long()
        q_lens = starts[1:] - starts[:-1]
        row_of_token = torch.repeat_interleave(
            torch.arange(len(rows), device=rows.device), q_lens, output_size=len(out.tokens)
        )
        offsets = torch.arange(len(out.tokens), device=rows.device) - starts[row_of_token]
        positions, lengths = context[row_of_token] + offsets, context + q_lens
        skips, token_rows = ended[row_of_token], rows[row_of_token]
    tokens = slots.last_token[token_rows]
    if host_tokens is not None:
        tokens = torch.where(host_tokens < 0, tokens, host_tokens.long())
    last_column = slots.page_table.shape[1] - 1
    columns = (positions // page_size).clamp(max=last_column)
    pages = slots.page_table[token_rows, columns].long()
    out.tokens.copy_(tokens.masked_fill(skips, 0))
    out.positions.copy_(positions.masked_fill(skips, 0))
    out.locations.copy_((pages * page_size + positions % page_size).masked_fill(skips, scratch_location))
    out.kv_lens.copy_(lengths.masked_fill(ended, 0) if empties_ended else lengths)
    torch.index_select(slots.page_table[:, : out.page_table.shape[1]], 0, rows, out=out.page_table)
    slots.seq_len[rows] = torch.where(rows == len(slots.seq_len) - 1, 0, lengths)


def advance_ends(slots: SlotTensors, rows: Tensor, drawn: Tensor) -> None:
    """Make the drawn tokens the last ones of their slots, and end the slots that draw one of their stop_ids or a NaN.

    rows: int64 [n], no slot twice but the scratch slot; drawn: int32 [n], -1 for a row whose logits held a NaN, which
    counts as token 0 for its slot. The tokens of slots that had ended before become 0, in `drawn` too.
    """
    had_ended = slots.ended[rows]
    drawn.masked_fill_(had_ended, 0)
    ends = (slots.stop_ids[rows] == drawn.unsqueeze(1)).any(dim=1) | (drawn < 0)
    slots.last_token[rows] = drawn.long().clamp(min=0)
    slots.ended[rows] = had_ended | ends
