"""Log probabilities of tokens, and of the most likely ones beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling import GREEDY_TEMPERATURE, filter_thresholds


def score_tokens(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax of each row at its token and at the row's `width` largest logits.

    logits: `[rows, vocab]`, of any float dtype and computed with in float32; tokens: int64 `[rows]`; width: 0..vocab.
    Returns float32 `[rows]`, int64 `[rows, width]` and float32 `[rows, width]`: the token's logprob, the most likely
    tokens (best first, ties: the lowest id first) and their logprobs. A row that holds a NaN gives NaN logprobs.
    """
    logits = logits.float()
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)
    ids = _largest(logits, width)
    return chosen, ids, logprobs.gather(1, ids)


def processed_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, needs_filter: bool
) -> Tensor:
    """The logits a token is drawn from: over temperature, and -inf where a filter keeps the token out.

    Arguments as in `kernels.sampling.sample`. Returns float32 `[rows, vocab]`, a tensor of its own. A greedy row draws
    from nothing: it counts as temperature 1 without filters.
    """
    greedy = temperature < GREEDY_TEMPERATURE
    scaled = logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    if needs_filter:
        threshold = filter_thresholds(scaled, top_k, top_p, min_p).masked_fill_(greedy, -torch.inf)
        scaled.masked_fill_(scaled < threshold.unsqueeze(1), -torch.inf)
    return scaled


def _largest(logits: Tensor, width: int) -> Tensor:
    """Ids of each row's largest values in order, int64 `[rows, width]`.

    topk leaves open which of several equal values it takes, and 16-bit models have many of them. So it sorts integers
    that are all different: the float's bits, made to sort like the float, above the id counted from the end.
    """
    vocab = logits.shape[1]
    if width == 0:
        return torch.empty(logits.shape[0], 0, dtype=torch.int64, device=logits.device)
    # Adding 0 makes -0.0, which equals 0.0, the same bits.
    bits = (logits + 0.0).view(torch.int32)
    bits.bitwise_xor_((bits >> 31).bitwise_and_(0x7FFFFFFF))
    from_end = torch.arange(vocab - 1, -1, -1, device=logits.device)
    keys = bits.to(torch.int64).mul_(1 << 32).add_(from_end)
    return (vocab - 1) - keys.topk(width, dim=-1).values.bitwise_and_(0xFFFFFFFF)
