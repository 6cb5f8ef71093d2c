"""What a draw may be: the reference's winner, or one that only the last bits of float32 numbers tell apart from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.noise import SAMPLE, hash_columns
from kernels.sampling import GREEDY_TEMPERATURE, filter_thresholds

EDGE = 2e-5
"""Of the mass: how far from p the sum of some ten thousand float32 terms may put the edge of top-p."""


@dataclass(frozen=True, eq=False)
class Parameters:
    """The vectors of `kernels.sampling.sample`, in its order."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, self.positions

    def filters(self) -> tuple[Tensor, ...]:
        return self.temperature, self.top_k, self.top_p, self.min_p

    def at(self, rows: slice | Tensor) -> Parameters:
        return Parameters(*(vector[rows].contiguous() for vector in self.all()))


def parameters(
    settings: list[tuple[float, int, float, float]], device: torch.device, generator: torch.Generator
) -> Parameters:
    """One row for each (temperature, top_k, top_p, min_p), with seeds and positions of their own."""
    columns = list(zip(*settings, strict=True))
    floats = [torch.tensor(column, dtype=torch.float32, device=device) for column in columns]
    top_k = torch.tensor(columns[1], dtype=torch.int64, device=device)
    seeds = torch.randint(-(2**62), 2**62, (len(settings),), generator=generator).to(device)
    positions = torch.randint(0, 2**32, (len(settings),), generator=generator).to(device)
    return Parameters(floats[0], top_k, floats[2], floats[3], seeds, positions)


def exact_noise(seeds: Tensor, positions: Tensor, num_columns: int, purpose: int = SAMPLE) -> Tensor:
    """The noise of the reference's hash bits in float64."""
    bits = hash_columns(seeds, positions, purpose, num_columns) & 0x7FFFFFFF
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-uniform))


def scaled_logits(logits: Tensor, temperature: Tensor) -> Tensor:
    return logits.float() / torch.where(temperature < GREEDY_TEMPERATURE, 1.0, temperature).unsqueeze(1)


def edge_thresholds(scaled: Tensor, params: Parameters) -> tuple[Tensor, Tensor, Tensor]:
    """The reference's thresholds for p, and for a little less and a little more of it; float32 `[rows]` each."""
    top_k, top_p, min_p = params.top_k, params.top_p, params.min_p
    below, above = torch.where(top_p < 1, top_p - EDGE, top_p), torch.where(top_p < 1, top_p + EDGE, top_p)
    several = [filter_thresholds(scaled, top_k, p, min_p) for p in (top_p, below, above)]
    return several[0], several[1], several[2]


def assert_draws(logits: Tensor, params: Parameters, drawn: Tensor, *, filtered: bool = True) -> None:
    """Every drawn token is the best of those that pass: its perturbed logit, in float64, is the largest but for 1e-5.

    Rows without NaN. Which tokens pass may differ by those on the edge of top-p.
    """
    scaled = scaled_logits(logits, params.temperature)
    perturbed = scaled.double() + exact_noise(params.seeds, params.positions, logits.shape[1])
    greedy = (params.temperature < GREEDY_TEMPERATURE).unsqueeze(1)
    perturbed = torch.where(greedy, logits.double(), perturbed)
    tokens = drawn.long().unsqueeze(1)
    assert drawn.dtype == torch.int32
    assert bool((tokens >= 0).all()) and bool((tokens < logits.shape[1]).all())
    fine = torch.zeros_like(drawn, dtype=torch.bool)
    for threshold in edge_thresholds(scaled, params) if filtered else (torch.full_like(scaled[:, 0], -torch.inf),):
        passing = torch.where(greedy | (scaled >= threshold.unsqueeze(1)), perturbed, -torch.inf)
        best = passing.amax(dim=1)
        # The noise may be wrong by 6e-6; the sum is a float32.
        slack = 1e-5 + 1e-6 * best.abs()
        slack = torch.where(greedy.squeeze(1) | best.isinf(), 0.0, slack)
        fine |= passing.gather(1, tokens).squeeze(1) >= best - slack
    assert bool(fine.all()), (~fine).nonzero().flatten().tolist()
