"""What goes along with every pass of the model: it sees the hidden states that a drafter lives on."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kernels.attention import AttentionBatch


class Follower(Protocol):
    """Told of a pass's rows before it, and of its hidden states at its end; may be captured in graphs."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers before which hidden states are wanted, ascending; the number of layers means those before the last
        norm, one more those after it."""
        ...

    def expect(self, rows: Tensor, q_starts: Tensor | None, parents: Tensor | None = None) -> None:
        """The next pass is of the slots `rows` (int64 [n]). q_starts: int32 [n + 1], where the tokens of each begin;
        None: each has as many. parents: int64 [n, K], where each has K + 1 nodes of a tree (kernels/speculative.py);
        None: a token follows the one before it."""
        ...

    def follow(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> None:
        """The pass has come to its end. inputs to locations: as for Decoder.forward; states: [num_tokens, hidden] of
        each of `layers`."""
        ...
