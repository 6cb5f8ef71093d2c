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
    least_common: int | None = None
    """Keys to be saved by going once through what contexts of decoding rows have in common, for plans to tell of it;
    None: they never do."""
