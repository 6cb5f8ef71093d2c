"""What rows of a batch ask of their logits, and the rules for it written out token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

F = np.float32


@dataclass
class Wish:
    """What one row asks for; nothing by default."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    bias: dict[int, float] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    min_len: int = 0


def naive(logits: np.ndarray, wish: Wish, kv_len: int) -> np.ndarray:
    """The rules, one token after the other, in float32."""
    changed = logits.copy()
    for j in range(len(logits)):
        x, count = F(logits[j]), wish.output.count(j)
        if j in wish.prompt or count:
            x = x / F(wish.repetition) if x > 0 else x * F(wish.repetition)
        x = x - F(count) * F(wish.frequency)
        if count:
            x = x - F(wish.presence)
        if j in wish.bias:
            x = x + F(wish.bias[j])
        if j in wish.ends and kv_len < wish.min_len and not np.isnan(x):
            x = F(-np.inf)
        changed[j] = x
    return changed


def random_wish(rng: np.random.Generator, vocab: int) -> Wish:
    ids = rng.integers(0, vocab, 30).tolist()
    return Wish(
        repetition=float(rng.choice([1.0, 0.5, 1.3, 2.0])),
        presence=float(rng.choice([0.0, -2.0, 0.7])),
        frequency=float(rng.choice([0.0, 1.1, -0.3])),
        prompt=ids[:12] + ids[:4],
        output=ids[10:25] + ids[10:14],
        bias={int(token): float(rng.normal() * 30) for token in rng.choice(vocab, int(rng.integers(0, 9)), False)},
        ends=rng.choice(vocab, int(rng.integers(0, 4)), replace=False).tolist(),
        min_len=int(rng.integers(0, 3)) * 20,
    )
