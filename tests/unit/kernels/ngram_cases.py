"""Random texts that repeat themselves, and corpora that have something in common with them."""

from __future__ import annotations

import random

import torch

from kernels.ngram import NgramSearch, ngram_tree
from kernels.speculative import Drafts
from scheduler_proc.speculative.corpus_index import index_corpus

SLOTS = 4


class NgramCase:
    """Few kinds of tokens, so that much matches."""

    def __init__(self, seed: int, branches: int | None = None, with_corpus: bool | None = None) -> None:
        rng = random.Random(seed)
        kinds, width = rng.randint(2, 4), rng.randint(4, 60)
        texts = [[rng.randint(0, kinds) for _ in range(width)] for _ in range(SLOTS + 1)]
        for text in texts:
            for _ in range(rng.randint(0, 3)):
                # What was there comes again.
                source, target, num = rng.randrange(width), rng.randrange(width), rng.randint(2, 12)
                text[target : target + num] = text[source : source + num]
                del text[width:]
                text.extend(rng.randint(0, kinds) for _ in range(width - len(text)))
        self.texts = torch.tensor(texts, dtype=torch.int32)
        self.seq_len = torch.tensor([rng.randint(0, width - 2) for _ in range(SLOTS + 1)])
        self.rows = torch.tensor(rng.sample(range(SLOTS), rng.randint(1, SLOTS)))
        self.num_drafts = rng.randint(1, 9)
        least = rng.randint(1, 3)
        self.search = NgramSearch(least, least + rng.randint(0, 4), branches or rng.randint(1, 4))
        self.corpus = None
        if rng.random() < 0.6 if with_corpus is None else with_corpus:
            tokens = [rng.randint(0, kinds + 1) for _ in range(rng.randint(2, 80))]
            self.corpus = index_corpus(
                torch.tensor(tokens, dtype=torch.int32).numpy(), self.search, torch.device("cpu")
            )

    def on(self, device: torch.device) -> NgramCase:
        """The same on a device."""
        self.texts, self.seq_len, self.rows = (t.to(device) for t in (self.texts, self.seq_len, self.rows))
        if self.corpus is not None:
            for name, value in vars(self.corpus).items():
                object.__setattr__(self.corpus, name, value.to(device))
        return self

    def drafts(self) -> Drafts:
        return ngram_tree(
            self.texts, self.seq_len, self.rows, self.num_drafts, self.search, self.texts.shape[1], self.corpus
        )
