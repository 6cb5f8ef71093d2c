"""What drafts leave of the distribution that is drawn from: all of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.sampling import filter_thresholds, sample
from kernels.speculative import Drafts, VerifyLimits, take_accepted, verify_inputs
from kernels.step import SlotTensors, empty_inputs

ROWS, VOCAB, CONTEXT = 24_000, 6, 5
# The 99.99th percentile of chi-square with VOCAB**2 - 1 = 35 degrees of freedom.
LIMIT = 78.0


@pytest.mark.parametrize("as_tree", [False, True])
@pytest.mark.parametrize(("temperature", "top_p", "min_p"), [(1.0, 1.0, 0.0), (0.7, 0.9, 0.0), (1.5, 1.0, 0.2)])
def test_two_tokens_have_their_joint_distribution(
    temperature: float, top_p: float, min_p: float, as_tree: bool
) -> None:
    """A model whose logits follow from the last token alone; each row has a seed and drafts of its own, some of which
    know the likeliest token."""
    generator = torch.Generator().manual_seed(7)
    table = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    start = 2
    drafts = Drafts(
        torch.randint(-1, VOCAB, (ROWS, 5), generator=generator),
        torch.stack([torch.randint(0, node + 1, (ROWS,), generator=generator) for node in range(5)], 1)
        if as_tree
        else None,
    )
    drafts.tokens[: ROWS // 2, 0] = table[start].argmax()
    slots = SlotTensors(
        torch.full((ROWS + 1,), CONTEXT),
        torch.full((ROWS + 1,), start),
        torch.zeros(ROWS + 1, dtype=torch.bool),
        torch.full((ROWS + 1, 1), -1, dtype=torch.int32),
        torch.zeros(ROWS + 1, 2, dtype=torch.int32),
    )
    limits = VerifyLimits(torch.full((ROWS + 1,), 100), torch.full((ROWS + 1,), 9, dtype=torch.int32))
    rows, seeds = torch.arange(ROWS), torch.randint(0, 1 << 40, (ROWS,), generator=generator)
    nodes = verify_inputs(rows, drafts, slots, limits, 16, 0, empty_inputs(ROWS * 6, ROWS, 2, rows.device))

    def draw(last: torch.Tensor, of: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        num = len(last)
        return sample(
            table[last],
            torch.full((num,), temperature),
            torch.full((num,), -1),
            torch.full((num,), top_p),
            torch.full((num,), min_p),
            of,
            positions,
            needs_filter=top_p < 1 or min_p > 0,
            all_greedy=False,
        )

    at_nodes = torch.cat((torch.full((ROWS, 1), start), drafts.tokens.clamp(min=0)), dim=1)
    drawn = draw(at_nodes.flatten(), seeds.repeat_interleave(6), nodes.kv_lens.flatten()).view(ROWS, 6)
    taken = take_accepted(rows, nodes, drawn, slots, limits)
    first, second = taken.tokens[:, 0].long(), taken.tokens[:, 1].long()
    # Whose first token was no draft draws the second in a step of its own.
    later = draw(first, seeds, torch.full((ROWS,), CONTEXT + 2)).long()
    second = torch.where(taken.counts > 1, second, later)
    assert 0.1 < float((taken.counts > 1).double().mean()) < 0.9
    # With equal logits even the tokens are the same.
    assert torch.equal(second, later)

    scaled = table / temperature
    threshold = filter_thresholds(
        scaled, torch.full((VOCAB,), -1), torch.full((VOCAB,), top_p), torch.full((VOCAB,), min_p)
    )
    probs = scaled.masked_fill(scaled < threshold.unsqueeze(1), -torch.inf).softmax(dim=-1).double().numpy()
    expected = (probs[start][:, None] * probs).ravel() * ROWS
    counted = np.bincount((first * VOCAB + second).numpy(), minlength=VOCAB**2)
    assert not counted[expected == 0].any()
    possible = expected > 0
    assert float(((counted - expected)[possible] ** 2 / expected[possible]).sum()) < LIMIT
