"""What proposes tokens for the model to verify. A new method is one more class with these functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.plan import Joins


class Drafter(Protocol):
    """Lives beside the device's slots and works in the order of its steps, without waiting for the device."""

    @property
    def kv(self) -> Sequence[Tensor]:
        """Pages of its own, by the model's ids: what is accepted moves in them as in the model's."""
        ...

    def join(self, joins: Joins) -> None:
        """New occupants of slots."""
        ...

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        """`num_drafts` nodes for each of the slots `rows` (int64 [n]), whose texts have `longest` tokens at most, and
        nothing is written beyond limits."""
        ...

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        """What the slots `rows` have taken of their drafts, whose nodes went through the model last."""
        ...

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        """The slots `rows` have new tokens without drafts, int32 [n, 1]; their seq_len has advanced."""
        ...

    def clear(self) -> None:
        """Forget everything: there was nobody but made-up requests."""
        ...
