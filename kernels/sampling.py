"""Choosing a token per row."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.noise import SAMPLE, gumbel_noise

GREEDY_TEMPERATURE = 1e-6
"""Temperatures below this mean the most likely token."""

_PREFIX = 1024


def argmax_rows(logits: Tensor) -> Tensor:
    """The most likely token of each row (ties: the lowest id); -1 where a row holds a NaN.

    logits: `[rows, vocab]`; returns int32 `[rows]`.
    """
    best, token = logits.max(dim=-1)
    return token.masked_fill_(best.isnan(), -1).to(torch.int32)


def advance(last_token: Tensor, rows: Tensor, drawn: Tensor) -> None:
    """`last_token[rows] = drawn`, with 0 in the place of -1 (a row that failed): what comes next needs a token.

    last_token: int64 `[slots]`; rows: int64 `[n]`, no slot twice; drawn: int32 `[n]`.
    """
    last_token[rows] = drawn.to(torch.int64).clamp(min=0)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    needs_filter: bool,
    all_greedy: bool,
    purpose: int = SAMPLE,
) -> Tensor:
    """Draw one token per row; the draw depends on the row's logits, parameters, seed and position only.

    logits: `[rows, vocab]`, of any float dtype and computed with in float32; temperature, top_p, min_p: float32
    `[rows]`; top_k: int `[rows]`, < 1 is off;
    seeds, positions: int64 `[rows]`. Returns int32 `[rows]`. A row with temperature < 1e-6 takes its argmax (ties: the
    lowest id); a row with a NaN anywhere gives -1. Otherwise the largest of `logits / temperature + gumbel_noise` among
    the tokens that pass the filters (`filter_thresholds`). The host says what it knows: `needs_filter` False if no row
    filters, `all_greedy` True if every row is greedy.
    """
    if all_greedy:
        return argmax_rows(logits)
    greedy = (temperature < GREEDY_TEMPERATURE).unsqueeze(1)
    scaled = logits.float() / torch.where(greedy, 1.0, temperature.unsqueeze(1))
    if needs_filter:
        threshold = filter_thresholds(scaled, top_k, top_p, min_p).unsqueeze(1)
        # Not "keep where >=": a NaN must survive to be reported.
        scaled.masked_fill_(scaled < threshold, -torch.inf)
    noise = gumbel_noise(seeds, positions, purpose, logits.shape[1])
    return argmax_rows(torch.where(greedy, logits, noise.add_(scaled)))


def filter_thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest scaled logit of each row that passes top-k, then top-p, then min-p.

    scaled: float32 `[rows, vocab]`, logits over temperature; top_k, top_p, min_p: `[rows]`. Returns float32 `[rows]`.
    top-k keeps the k largest (off below 1); top-p keeps, of the rest renormalised, the fewest largest whose mass
    reaches p (off from 1 on; always at least one); min-p keeps what has at least min_p times the largest probability.
    Tokens that tie with the last one kept are kept too. Sources: Holtzman et al., 2019 (top-p); Nguyen et al., 2024
    (min-p).
    """
    vocab = scaled.shape[1]
    by_min_p = scaled.amax(dim=-1) + min_p.log()
    # Reading back whether the prefix was enough would make a device wait, so only the CPU takes the short way.
    if scaled.device.type == "cpu" and vocab > 4 * _PREFIX:
        threshold, complete = _prefix_thresholds(scaled, top_k, top_p, _PREFIX)
        if bool(complete.all()):
            return torch.maximum(threshold, by_min_p)
    threshold, _ = _prefix_thresholds(scaled, top_k, top_p, vocab)
    return torch.maximum(threshold, by_min_p)


def _prefix_thresholds(scaled: Tensor, top_k: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """top-k and top-p thresholds from the `size` largest logits, and per row whether those were enough."""
    vocab = scaled.shape[1]
    if size == vocab:
        ordered = scaled.sort(dim=-1, descending=True).values
    else:
        ordered = scaled.topk(size, dim=-1).values
    limited = (top_k >= 1) & (top_k < vocab)
    kth = ordered.gather(1, (top_k.clamp(1, size).long() - 1).unsqueeze(1))
    by_top_k = torch.where(limited.unsqueeze(1), kth, -torch.inf)
    rest = ordered.masked_fill(ordered < by_top_k, -torch.inf)
    limited_complete = (top_k <= size) & (ordered[:, -1] < kth.squeeze(1))
    total = torch.where(limited, rest.logsumexp(dim=-1), scaled.logsumexp(dim=-1)).unsqueeze(1)
    mass = (rest - total).exp_()
    before = mass.cumsum(dim=-1) - mass
    count = (before < top_p.unsqueeze(1)).sum(dim=-1, keepdim=True).clamp_(min=1)
    filters_p = (top_p < 1).unsqueeze(1)
    by_top_p = torch.where(filters_p, rest.gather(1, count - 1), -torch.inf)
    reached = ~filters_p.squeeze(1) | (count.squeeze(1) < size)
    complete = torch.where(limited, limited_complete, reached)
    if size == vocab:
        complete = torch.ones_like(complete)
    return torch.maximum(by_top_k, by_top_p).squeeze(1), complete
