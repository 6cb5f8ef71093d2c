"""The models whose shapes are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What of a model the kernels see."""

    name: str
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    qk_norm: bool

    @property
    def qkv(self) -> int:
        """Outputs of the fused projection of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every matrix that a decode step multiplies by."""
        return {
            "qkv": (self.qkv, self.hidden),
            "o": (self.hidden, self.num_heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("8B", 4096, 14336, 32, 8, 128, 128_256, qk_norm=False),
        Shape("0.6B", 1024, 3072, 16, 8, 128, 151_936, qk_norm=True),
    )
}
"""Llama 3.1 8B and Qwen 3 0.6B."""
