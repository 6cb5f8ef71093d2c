"""Trees that grow where a drafter is most confident: beams, of whose nodes the likeliest are kept.

Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", 2024. All shapes are fixed by the
numbers of rows, beams, steps and kept nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.speculative import Drafts


@dataclass
class GrowingTree:
    """Of n rows. A frontier of `width` nodes is extended at each step; every node's extensions are candidates.

    Candidates are numbered: those of node 0 first, then those of each frontier, node by node.
    """

    width: int
    tokens: Tensor
    """int64 [n, candidates]"""
    scores: Tensor
    """float32 [n, candidates]: the logarithm of the product of probabilities on the way to each."""
    parents: Tensor
    """int64 [n, candidates]: the candidate before each, -1 for node 0."""
    frontier: Tensor
    """int64 [n, width]: candidates, most likely first."""
    frontiers: Tensor
    """int64 [n, (depth - 1) * width]: candidates that were extended before."""

    @classmethod
    def begin(cls, log_probs: Tensor, ids: Tensor) -> GrowingTree:
        """log_probs: float32 [n, width], the most likely tokens after node 0, best first; ids: int64 [n, width]."""
        num_rows, width = ids.shape
        frontier = torch.arange(width, device=ids.device).expand(num_rows, -1)
        return cls(width, ids, log_probs, torch.full_like(ids, -1), frontier, frontier[:, :0])

    def grow(self, log_probs: Tensor, ids: Tensor) -> None:
        """What may come after the frontier: float32, int64 [n, width, width], best first."""
        num_rows, width = len(ids), self.width
        first = self.tokens.shape[1]
        scores = (self.scores.gather(1, self.frontier).unsqueeze(2) + log_probs).view(num_rows, -1)
        self.tokens = torch.cat((self.tokens, ids.reshape(num_rows, -1)), dim=1)
        self.parents = torch.cat((self.parents, self.frontier.repeat_interleave(width, dim=1)), dim=1)
        self.scores = torch.cat((self.scores, scores), dim=1)
        self.frontiers = torch.cat((self.frontiers, self.frontier), dim=1)
        # Of equals the first.
        self.frontier = first + scores.sort(dim=1, descending=True, stable=True).indices[:, :width]

    def extended(self) -> tuple[Tensor, Tensor]:
        """The nodes that have been extended or will be next, int64 [n, depth * width]: their tokens, and their parents
        among them, counted from 1; 0 is node 0."""
        nodes = torch.cat((self.frontiers, self.frontier), dim=1)
        return self.tokens.gather(1, nodes), self._places(nodes, self.parents.gather(1, nodes))

    def best(self, num: int) -> Drafts:
        """The num most likely candidates; a node's ancestors are likelier than it is, so they are among them."""
        kept = self.scores.sort(dim=1, descending=True, stable=True).indices[:, :num].sort(dim=1).values
        parents = self._places(kept, self.parents.gather(1, kept))
        return Drafts(self.tokens.gather(1, kept), parents)

    @staticmethod
    def _places(nodes: Tensor, wanted: Tensor) -> Tensor:
        """Where the wanted candidates [n, m] are among nodes [n, m], counted from 1; 0 for -1."""
        same = nodes.unsqueeze(1) == wanted.unsqueeze(2)
        return torch.where(wanted < 0, 0, same.byte().argmax(dim=2) + 1)
