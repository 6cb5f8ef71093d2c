"""Sampling: distribution, filters against brute force, ties, NaN rows, independence of neighbours."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.noise import ACCEPT, RESIDUAL, SAMPLE, gumbel_noise, hash_columns, uniform_rows
from kernels.sampling import argmax_rows, filter_thresholds, sample

MASK = 0xFFFFFFFF


def _draw(logits: Tensor, n: int | None = None, **params: Any) -> Tensor:
    """Sample with the same parameters on every row; row i has seed i."""
    rows = logits.shape[0] if n is None else n
    values = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "min_p": 0.0} | params
    return sample(
        logits.expand(rows, -1) if n is not None else logits,
        torch.full((rows,), values["temperature"]),
        torch.full((rows,), int(values["top_k"])),
        torch.full((rows,), values["top_p"]),
        torch.full((rows,), values["min_p"]),
        torch.arange(rows),
        torch.full((rows,), 7),
        needs_filter=bool(params.keys() - {"temperature"}),
        all_greedy=False,
    )


def _chi_square(tokens: Tensor, probs: Tensor) -> float:
    counts = torch.bincount(tokens.long(), minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.2]])
    tokens = _draw(logits, 40_000, temperature=temperature)
    # 99.9th percentile of chi-square with 7 degrees of freedom; the seeds are fixed.
    assert _chi_square(tokens, (logits[0] / temperature).softmax(-1)) < 24.3


def test_distribution_over_positions_of_one_seed() -> None:
    rows, probs = 40_000, torch.tensor([0.4, 0.3, 0.2, 0.1])
    noise = gumbel_noise(torch.full((rows,), 1 << 40), torch.arange(rows), SAMPLE, 4)
    assert _chi_square((probs.log() + noise).argmax(-1), probs) < 16.3


def test_filtered_distribution() -> None:
    logits = torch.tensor([[3.0, 2.5, 2.0, 1.0, 0.0, -1.0]])
    tokens = _draw(logits, 20_000, top_k=3)
    assert int(tokens.max()) == 2
    assert _chi_square(tokens, logits[0, :3].softmax(-1)) < 13.9


def test_hash_against_plain_integers() -> None:
    from kernels import noise

    def mix(x: int, late: int = 0) -> int:
        x ^= x >> 16
        x = (x * noise.M1 + late) & MASK
        x ^= x >> 15
        x = x * noise.M2 & MASK
        return x ^ x >> 16

    def reference(seed: int, position: int, purpose: int, column: int) -> int:
        keys = []
        for key in (noise.A, noise.B):
            for word in (seed & MASK, seed >> 32 & MASK, position, purpose):
                key = mix(((key ^ word) + noise.STEP) & MASK)
            keys.append(key)
        return mix((column * noise.STEP + keys[0]) & MASK, keys[1])

    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 123456789012]
    positions = [0, 1, 2**31, 2**32 - 1, 5, 6]
    got = hash_columns(torch.tensor(seeds), torch.tensor(positions), RESIDUAL, 50)
    expected = [[reference(s, p, RESIDUAL, c) for c in range(50)] for s, p in zip(seeds, positions, strict=True)]
    assert (got.long() & MASK).tolist() == expected


def test_hash_flips_half_of_the_bits() -> None:
    base = torch.randint(0, 2**62, (500,), generator=torch.Generator().manual_seed(0))
    position = torch.arange(500)
    plain = hash_columns(base, position, SAMPLE, 16)
    for other in (
        *(hash_columns(base ^ (1 << bit), position, SAMPLE, 16) for bit in (0, 1, 31, 32, 61)),
        hash_columns(base, position + 1, SAMPLE, 16),
        hash_columns(base, position, ACCEPT, 16),
        hash_columns(base, position, SAMPLE, 17)[:, 1:],
    ):
        flipped = (plain ^ other).long() & MASK
        per_bit = torch.stack([(flipped >> bit & 1).double().mean() for bit in range(32)])
        assert bool((per_bit - 0.5).abs().max() < 0.03)


def test_uniform_rows() -> None:
    seeds, positions = torch.arange(20_000), torch.zeros(20_000, dtype=torch.int64)
    u = uniform_rows(seeds, positions, ACCEPT)
    assert bool((u > 0).all()) and bool((u < 1).all())
    ks = (u.sort().values - (torch.arange(20_000) + 0.5) / 20_000).abs().max()
    assert float(ks) < 1.95 / math.sqrt(20_000)
    assert not torch.equal(u, uniform_rows(seeds, positions, RESIDUAL))


def test_draw_does_not_depend_on_neighbours() -> None:
    gen = torch.Generator().manual_seed(1)
    rows, vocab = 12, 5000
    logits = torch.randn(rows, vocab, generator=gen) * 2
    args = (
        torch.rand(rows, generator=gen) * 2 + 0.1,
        torch.tensor([-1, 0, 5, 50, 2000, -1, 1, 9999, 3, -1, 40, 7]),
        torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.999, 0.1, 1.0, 0.0, 0.8, 0.95, 1.0]),
        torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.2, 0.0, 1.0]),
        torch.randint(-(2**62), 2**62, (rows,), generator=gen),
        torch.randint(0, 1000, (rows,), generator=gen),
    )
    args[0][4] = 0.0
    together = sample(logits, *args, needs_filter=True, all_greedy=False)
    for i in range(rows):
        row = slice(i, i + 1)
        alone = sample(logits[row], *(arg[row] for arg in args), needs_filter=True, all_greedy=False)
        assert alone.tolist() == together[row].tolist()
    assert int(together[4]) == int(logits[4].argmax())
    backwards = sample(logits.flip(0), *(arg.flip(0) for arg in args), needs_filter=True, all_greedy=False)
    assert torch.equal(backwards.flip(0), together)


def _allowed(scaled: Tensor, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that pass, one filter after the other, by definition."""
    x = scaled.double()
    order = sorted(range(len(x)), key=lambda i: -float(x[i]))
    kept = order
    if 1 <= top_k < len(order):
        last = x[order[top_k - 1]]
        kept = [i for i in order if x[i] >= last]
    if top_p < 1:
        probs = x[kept].softmax(-1)
        mass, count = 0.0, 0
        while count < len(kept) and (count == 0 or mass < top_p):
            mass += float(probs[count])
            count += 1
        last = x[kept[count - 1]]
        kept = [i for i in kept if x[i] >= last]
    if min_p > 0:
        kept = [i for i in kept if float(x[i] - x.max()) >= math.log(min_p)]
    return set(kept)


@pytest.mark.parametrize(
    ("vocab", "spread"),
    [
        *[(50, 0.05), (50, 1.0), (50, 6.0), (6000, 1.0)],
        *(pytest.param(6000, spread, marks=pytest.mark.slow) for spread in (0.05, 6.0)),
    ],
)
def test_filters_against_brute_force(vocab: int, spread: float) -> None:
    gen = torch.Generator().manual_seed(vocab)
    settings = [
        (k, p, m) for k in (-1, 0, 1, 3, 40, 3000, 10**6) for p in (0.0, 0.3, 0.9, 1.0) for m in (0.0, 0.2, 1.0)
    ]
    scaled = torch.randn(len(settings), vocab, generator=gen) * spread
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    thresholds = filter_thresholds(scaled, top_k, top_p.float(), min_p.float())
    for i, (k, p, m) in enumerate(settings):
        got = set(torch.nonzero(scaled[i] >= thresholds[i]).flatten().tolist())
        expected = _allowed(scaled[i], k, p, m)
        # Only a token on the very edge of the top-p mass may differ, by rounding of the sums.
        assert len(got ^ expected) <= (1 if 0 < p < 1 else 0), (k, p, m)


def test_prefix_and_full_sort_agree() -> None:
    from kernels.sampling import _prefix_thresholds

    scaled = torch.randn(6, 8000) * 4
    top_k = torch.tensor([-1, 5, 100, -1, 1000, 1])
    top_p = torch.tensor([0.9, 1.0, 0.7, 0.5, 0.95, 0.2])
    short, complete = _prefix_thresholds(scaled, top_k, top_p, 1024)
    full, _ = _prefix_thresholds(scaled, top_k, top_p, 8000)
    assert bool(complete.all())
    assert torch.equal(short, full)


def test_ties_at_the_threshold_are_kept() -> None:
    scaled = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    one = torch.ones(1)
    threshold = filter_thresholds(scaled, torch.tensor([2]), one, torch.zeros(1))
    assert (scaled >= threshold.unsqueeze(1))[0].tolist() == [False, True, True, True, True, False]


def test_argmax_ties_and_nan() -> None:
    logits = torch.zeros(4, 3000)
    logits[0, [7, 2999]] = 5.0
    logits[1, [1500, 20, 2000]] = 1.0
    logits[2, 2900] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    assert argmax_rows(logits).tolist() == [7, 20, -1, 0]
    assert argmax_rows(logits).dtype == torch.int32


@pytest.mark.parametrize("params", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.0}])
def test_nan_rows_report_minus_one(params: dict[str, float]) -> None:
    logits = torch.randn(3, 6000)
    logits[1, 4000] = torch.nan
    tokens = _draw(logits, None, **params)
    assert int(tokens[1]) == -1
    assert int(tokens[0]) >= 0 and int(tokens[2]) >= 0


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, 123] = -1e4
    assert set(_draw(logits, 200, temperature=2.0).tolist()) == {123}


def test_tiny_temperature_is_greedy_and_logits_stay() -> None:
    logits = torch.randn(4, 50)
    before = logits.clone()
    assert torch.equal(_draw(logits, temperature=1e-7, top_k=3), argmax_rows(logits))
    assert torch.equal(logits, before)
