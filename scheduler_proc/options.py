"""What bounds and orders the plans."""

from __future__ import annotations

import msgspec


class PlannerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds and orders the plans; lengths in tokens."""

    step_tokens: int = 256
    mixed_tokens: int = 1 << 30
    """The limit of a step in which rows decode, if it is less than step_tokens and leaves prompts their half."""
    chunk_tokens: int = 1 << 30
    """Most prompt tokens of one request in a step."""
    max_step_gap: int = 4
    policy: str = "fcfs"
    preemption_threshold: int = 10
    conservativeness: float = 1.0
    seed: int = 0
    most_common_rows: int = 0
    """Up to so many rows that decode, plans tell what their contexts have in common."""
    least_common: int = 1
    """Keys to be saved by going once through that, for plans to tell of it."""

    most_drafting_rows: int = 1 << 30
    """Steps of more rows verify no drafts."""
    draft_places: int = 0
    """Places behind a row's last known token that a step with drafts writes to at most, if that is more than drafts."""

    def most_tokens(self, num_decode: int) -> int:
        """Of a step in which so many rows decode."""
        if num_decode == 0:
            return self.step_tokens
        return min(self.step_tokens, max(self.mixed_tokens, 2 * num_decode))
