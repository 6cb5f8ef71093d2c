"""Random trees that grow, for the reference and for kernels."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kernels.beams import Candidates, Frontier
from kernels.speculative import Drafts


class Growth:
    """The same random trees whatever grows them: three rows, with equal scores among them."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.num_rows, self.width, self.steps = 3, 1 + seed % 5, 1 + seed % 4
        total = self.width + (self.steps - 1) * self.width**2
        self.num = min(1 + seed % 9, total)
        self.last = torch.arange(self.num_rows, device=device) + 1000
        self.likely = [self._likely(self.num_rows * (self.width if step else 1), device) for step in range(self.steps)]

    def _likely(self, num: int, device: torch.device) -> tuple[Tensor, Tensor]:
        # Few different values: there are ties.
        scores = -torch.randint(1, 6, (num, self.width), generator=self.generator).float() / 4
        ids = torch.randint(0, 900, (num, self.width), generator=self.generator)
        return scores.sort(dim=1, descending=True).values.to(device), ids.to(device)

    def grown(self, ops: ModuleType) -> tuple[Candidates, list[Frontier], Drafts]:
        candidates = Candidates.empty(self.num_rows, self.width, self.steps, self.last.device)
        frontiers: list[Frontier] = []
        for step, (log_probs, ids) in enumerate(self.likely):
            before = frontiers[-1] if frontiers else None
            frontiers.append(ops.grow(log_probs, ids, candidates, self.last, before, step))
        return candidates, frontiers, ops.best(candidates, self.num)
