"""Whether a model can be cut into --tp-size shares; known before any process is started (no torch)."""

from __future__ import annotations

from typing import Protocol

from engine.errors import ConfigError

_MOST_SHARES = 64


class Shape(Protocol):
    """What of a decoder is cut: ModelConfig has it, and a decoder's spec."""

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...


def check_shares(shape: Shape, size: int) -> None:
    """Raises ConfigError, with the sizes that are possible, for a decoder that cannot be cut into `size` shares."""
    if _can_share(shape, size):
        return
    allowed = ", ".join(str(other) for other in range(1, _MOST_SHARES + 1) if _can_share(shape, other))
    raise ConfigError(
        f"--tp-size {size} cannot share {shape.num_heads} heads, {shape.num_kv_heads} key/value heads and an MLP of "
        f"{shape.intermediate_size}; allowed for this model: {allowed}."
    )


def _can_share(shape: Shape, size: int) -> bool:
    """Heads and the MLP are cut evenly; key/value heads too, or each is held by the same number of shares."""
    cuts_kv = shape.num_kv_heads % size == 0 or size % shape.num_kv_heads == 0
    return shape.num_heads % size == 0 and cuts_kv and shape.intermediate_size % size == 0
