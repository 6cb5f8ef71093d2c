"""Drafts without a model: what came after the last tokens when they were there before, in the text or in a corpus."""

from __future__ import annotations

from torch import Tensor

from kernels.dispatch import KernelSet
from kernels.ngram import NgramCorpus, NgramSearch, TreeShape
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from scheduler_proc.plan import Joins
from scheduler_proc.speculative.history import TokenHistory
from scheduler_proc.worker.device_slots import DeviceSlots


class NgramDrafter:
    """Chains by `kernels.speculative.ngram_drafts`; with several branches or a corpus, `kernels.ngram.ngram_tree`."""

    kv: tuple[Tensor, ...] = ()

    def __init__(
        self,
        kernels: KernelSet,
        slots: DeviceSlots,
        max_len: int,
        search: NgramSearch,
        corpus: NgramCorpus | None = None,
    ) -> None:
        """max_len: tokens of a request at most."""
        self._kernels = kernels
        self._slots = slots
        self._history = TokenHistory(kernels, slots, max_len)
        self._search = search
        self._corpus = corpus

    def join(self, joins: Joins) -> None:
        """See Drafter."""
        self._history.join(joins)

    def took(self, rows: Tensor, tokens: Tensor) -> None:
        """See Drafter."""
        self._history.took(rows, tokens)

    def verified(self, rows: Tensor, nodes: Nodes, taken: Taken) -> None:
        """See Drafter."""
        self._history.took(rows, taken.tokens, taken.counts)

    def clear(self) -> None:
        """See Drafter."""
        self._history.tokens.fill_(-1)

    def draft(self, rows: Tensor, num_drafts: int, longest: int, limits: VerifyLimits) -> Drafts:
        """See Drafter."""
        texts, seq_len, search = self._history.tokens, self._slots.seq_len, self._search
        if self._corpus is None and TreeShape.of(num_drafts, search.branches).branches == 1:
            # The same chain, for less.
            return Drafts(
                self._kernels.ngram_drafts(texts, seq_len, rows, num_drafts, search.least, search.most, longest)
            )
        return self._kernels.ngram_tree(texts, seq_len, rows, num_drafts, search, longest, self._corpus)
