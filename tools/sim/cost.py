"""How long a step takes on the device: a linear model of what the step holds, fitted to measured times."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from scheduler_proc.plan import StepPlan

ORIGIN = "Llama-3.1-8B bf16 on one H200, measured with SGLang 0.5.15"

KV_BYTES_PER_TOKEN = 131_072
"""32 layers x 2 x 8 KV heads x 128 x 2 bytes."""
READ_BYTES_PER_S = 4.235e12
"""Measured memory bandwidth: reading the KV of one token cannot take less than KV_BYTES_PER_TOKEN over this."""
KV_TOKEN_MS = 1000 * KV_BYTES_PER_TOKEN / READ_BYTES_PER_S

DECODE_CONTEXT = 1088
"""Mean context of the decode rows below: they went from 1024 to 1152 tokens."""
DECODE_MS = ((1, 4.79), (8, 5.24), (32, 6.26), (128, 10.56), (256, 17.69))
"""(batch, ms per step)"""
PREFILL_MS = ((512, 18.6), (1024, 29.4), (4096, 101.5), (16384, 483.0))
"""(tokens of one prompt, ms)"""
BATCHED_TOKENS_PER_S = 43_700.0
BATCHED_PROMPTS, BATCHED_PROMPT_TOKENS = 8, 1024
"""The shape of one step of batched prefill. Only its rate was measured; the shape is assumed."""


class Load(NamedTuple):
    """What a step holds, as the model sees it."""

    decode_rows: int
    kv_tokens: int
    """Context tokens that the decode rows read."""
    prefill_tokens: int
    pairs: float
    """(query, key) pairs of the prompts' attention: what grows with the square of a prompt."""


class Measured(NamedTuple):
    """One line of the table above."""

    name: str
    load: Load
    ms: float


class StepCost(msgspec.Struct, frozen=True):
    """Milliseconds per step, and per unit of each part of its load."""

    base: float
    decode_row: float
    kv_token: float
    prefill_token: float
    pair: float

    def ms(self, load: Load) -> float:
        return (
            self.base
            + self.decode_row * load.decode_rows
            + self.kv_token * load.kv_tokens
            + self.prefill_token * load.prefill_tokens
            + self.pair * load.pairs
        )


class Fit(msgspec.Struct, frozen=True):
    """The model, and (name, measured ms, modelled ms) of each line of the table."""

    cost: StepCost
    residuals: tuple[tuple[str, float, float], ...]


def pairs_of(q_lens: np.ndarray, kv_lens: np.ndarray) -> float:
    """Pairs of causal attention for chunks of q_lens[i] tokens that end at kv_lens[i]; both int [n]."""
    queries = q_lens.astype(np.float64)
    return float((queries * (kv_lens - queries / 2)).sum())


def load_of(plan: StepPlan) -> Load:
    """The load of a planned step."""
    num = plan.num_decode
    if num == len(plan.rows):
        return Load(num, int(plan.kv_lens.sum()), 0, 0.0)
    chunks = plan.q_lens[num:]
    return Load(num, int(plan.kv_lens[:num].sum()), int(chunks.sum()), pairs_of(chunks, plan.kv_lens[num:]))


def table() -> list[Measured]:
    """All measurements, as loads."""
    decode = [Measured(f"decode batch {num}", Load(num, num * DECODE_CONTEXT, 0, 0.0), ms) for num, ms in DECODE_MS]
    prefill = [Measured(f"prefill {num} tokens", Load(0, 0, num, num * num / 2), ms) for num, ms in PREFILL_MS]
    tokens = BATCHED_PROMPTS * BATCHED_PROMPT_TOKENS
    batched = Load(0, 0, tokens, BATCHED_PROMPTS * BATCHED_PROMPT_TOKENS**2 / 2)
    name = f"prefill {BATCHED_PROMPTS} x {BATCHED_PROMPT_TOKENS} tokens"
    return [*decode, *prefill, Measured(name, batched, 1000 * tokens / BATCHED_TOKENS_PER_S)]


def fit() -> Fit:
    """Least squares on relative errors; the price of a KV token is taken from the bandwidth, not fitted."""
    lines = table()
    rest = np.array([line.ms - KV_TOKEN_MS * line.load.kv_tokens for line in lines])
    columns = np.array(
        [(1.0, line.load.decode_rows, line.load.prefill_tokens, line.load.pairs) for line in lines], np.float64
    )
    weight = 1 / np.array([line.ms for line in lines])
    # Columns differ by ten orders of magnitude: scaled, so that no singular value is taken for zero.
    scale = np.abs(columns).max(axis=0)
    found = np.linalg.lstsq(columns / scale * weight[:, None], rest * weight, rcond=None)[0] / scale
    base, row, token, pair = (float(value) for value in found)
    cost = StepCost(base, row, KV_TOKEN_MS, token, pair)
    return Fit(cost, tuple((line.name, line.ms, cost.ms(line.load)) for line in lines))


def shown(fitted: Fit) -> str:
    """The fit for people."""
    cost = fitted.cost
    lines = [
        f"device time: {ORIGIN}",
        f"  ms = {cost.base:.3f} + {cost.decode_row:.5f} x decode rows + {cost.kv_token:.3e} x context tokens read"
        f" + {cost.prefill_token:.5f} x prompt tokens + {cost.pair:.3e} x attention pairs",
        f"  {'':<24} {'measured':>9} {'model':>9} {'error':>8}",
    ]
    for name, measured, modelled in fitted.residuals:
        lines.append(f"  {name:<24} {measured:>9.2f} {modelled:>9.2f} {(modelled / measured - 1) * 100:>+7.1f}%")
    return "\n".join(lines)
