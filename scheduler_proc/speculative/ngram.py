"""Drafts without a model: what came after the last tokens when they were there before, in the text itself."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.speculative import Drafts
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.history import TokenHistory
from scheduler_proc.worker.device_slots import DeviceSlots


class NgramDrafter:
    """Looks for the longest end of a text that is also somewhere before, of `most` tokens at most and `least` at least;
    of equals the latest. What follows there is drafted; where that reaches the end of the text, it is repeated.

    Source: Saxena, "Prompt Lookup Decoding", 2023.
    """

    def __init__(self, slots: DeviceSlots, max_len: int, *, least: int, most: int) -> None:
        self._slots = slots
        self._history = TokenHistory(slots, max_len)
        self._least = least
        self._most = most

    def join(self, joins: Joins) -> None:
        """See Drafter."""
        self._history.join(joins)

    def took(self, rows: Tensor, tokens: Tensor, counts: Tensor | None = None) -> None:
        """See Drafter."""
        self._history.took(rows, tokens, counts)

    def clear(self) -> None:
        """See Drafter."""
        self._history.tokens.fill_(-1)

    def draft(self, rows: Tensor, num_drafts: int, longest: int) -> Drafts:
        """See Drafter."""
        width = min(longest, self._history.tokens.shape[1] - 1)
        texts = self._history.tokens[rows, :width]
        last = self._slots.seq_len[rows].clamp(max=width - 1).unsqueeze(1)
        place, found = best_matches(texts, last, least=self._least, most=self._most)
        # Behind the end the text repeats what is between the match and the end.
        period = (last - place).clamp(min=1)
        ahead = torch.arange(num_drafts, device=rows.device)
        tokens = texts.gather(1, place + 1 + ahead % period).long()
        return Drafts(tokens.masked_fill(~found, -1))


def best_matches(texts: Tensor, last: Tensor, *, least: int, most: int) -> tuple[Tensor, Tensor]:
    """Where the ends of texts were before.

    texts: int32 [n, width]; last: int64 [n, 1], the place of each text's last token. Returns int64 [n, 1], the place of
    the last token of the longest earlier match (0 without one), and bool [n, 1], whether there is one of `least` tokens
    or more; of those of `most` tokens or more the latest is taken.
    """
    width = texts.shape[1]
    place = torch.arange(width, device=texts.device)
    matches = place < last
    lengths = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(min(most, width)):
        token = texts.gather(1, (last - back).clamp(min=0))
        same = torch.zeros_like(matches)
        same[:, back:] = texts[:, : width - back] == token
        matches = matches & same & (last >= back)
        lengths += matches
    score = torch.where(lengths >= least, lengths * width + place, -1)
    best, at = score.max(dim=1, keepdim=True)
    found = best >= 0
    return torch.where(found, at, 0), found
