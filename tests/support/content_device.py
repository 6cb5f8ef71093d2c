"""A device whose every token depends on every KV entry it reads, so that one wrong, stale or foreign entry shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.plan import Handle, StepPlan, StepResult
from tests.support.scheduler import VOCAB

POISON = -1
FIRST_TOKEN = 3
"""Lowest token that is ever sampled."""


def _weights(positions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """uint64: what a token at a position adds to the sum that decides the next token."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= (positions.astype(np.uint64) + np.uint64(7)) * np.uint64(0xC2B2AE3D27D4EB4F)
    return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)


def _token(total: int) -> int:
    total &= (1 << 64) - 1
    return FIRST_TOKEN + ((total ^ (total >> 31)) >> 7) % (VOCAB - FIRST_TOKEN)


def expected_tokens(prompt: Sequence[int], num: int) -> list[int]:
    """The first `num` tokens after a prompt, computed without pages, steps or a cache."""
    total = int(_weights(np.arange(len(prompt)), np.array(prompt)).sum())
    tokens: list[int] = []
    for position in range(len(prompt), len(prompt) + num):
        tokens.append(_token(total))
        total += int(_weights(np.array([position]), np.array(tokens[-1:]))[0])
    return tokens


class _Memory:
    """One cache group's KV entries [num_pages, page_size] and page tables [num_slots, max_pages]."""

    def __init__(self, group: CacheGroup, num_pages: int, page_size: int, num_slots: int, max_pages: int) -> None:
        self.group = group
        self.page_size = page_size
        self.tokens = np.full((num_pages, page_size), POISON, np.int64)
        self.owners = np.full((num_pages, page_size), POISON, np.int64)
        self.is_nan = np.zeros((num_pages, page_size), bool)
        self.table = np.full((num_slots, max_pages), -1, np.int64)

    def free(self, pages: np.ndarray) -> None:
        self.tokens[pages] = POISON
        self.owners[pages] = POISON
        self.is_nan[pages] = False

    def places(self, slot: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.table[slot, positions // self.page_size], positions % self.page_size


class ContentDevice:
    """Keeps tokens for KV. A step that is launched works when it is collected; `eager`: at once.

    A row's token is a hash of all tokens that it reads through its page table, and another one if an entry is poisoned
    (its page was freed), belongs to another owner, or differs between groups within their windows. An entry that
    is NaN makes NaN of what is computed from it.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_pages: Sequence[int],
        page_size: int,
        num_slots: int,
        max_len: int,
        *,
        eager: bool = False,
    ) -> None:
        self._memories = [
            _Memory(group, num, page_size, num_slots, max_len // page_size + 2)
            for group, num in zip(groups, num_pages, strict=True)
        ]
        self._eager = eager
        self._last = np.full(num_slots, POISON, np.int64)
        """The token each slot sampled last."""
        self._lens = np.zeros(num_slots, np.int64)
        self._owner_of: Callable[[int], int] = lambda slot: 0
        self._owners: dict[int, list[int]] = {}
        """By step, of each row of the launched plans."""
        self.refuses_next = False
        """The next plan cannot be launched."""
        self.loses_next: str | None = None
        """The next step fails `before` it has written anything, or `after` all."""
        self.nan_next: int | None = None
        """The row (modulo the number of rows) of the next step that computes NaN."""
        self.num_nan_rows = 0
        self._common_version = -1
        self._common_pages = self._memories[0].table[0]
        self.num_common_steps = 0
        """Steps whose plans said that rows have something in common."""

    def watch(self, cache: KvCache, owner_of: Callable[[int], int]) -> None:
        """Hear of pages that come free, and whose entries (a number) a slot works for."""
        self._owner_of = owner_of
        for pool, memory in zip(cache.pools, self._memories, strict=True):
            pool._on_free = memory.free

    # -- as a Device ----------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Handle:
        if self.refuses_next:
            self.refuses_next = False
            raise RuntimeError("refused")
        handle = Handle(plan)
        owners = [self._owner_of(slot) for slot in plan.rows.tolist()]
        if self._eager:
            try:
                handle.result = self._run(plan, owners)
            except RuntimeError as error:
                handle.result = error
        else:
            self._owners[plan.step] = owners
        return handle

    def collect(self, handle: Handle) -> StepResult:
        result = handle.result
        if result is None:
            result = self._run(handle.plan, self._owners.pop(handle.plan.step))
        if isinstance(result, Exception):
            raise result
        return result

    def pages_freed(self, pages: np.ndarray) -> None:
        """Which group's pages these are is not said here: see `watch`."""

    def close(self) -> None:
        """Nothing to let go of."""

    # -- a step ---------------------------------------------------------------------------------------------------

    def _run(self, plan: StepPlan, owners: list[int]) -> StepResult:
        lost, self.loses_next = self.loses_next, None
        for memory, updates in zip(self._memories, plan.pages, strict=True):
            if updates is not None:
                memory.table[updates.slots, updates.columns] = updates.pages
        if plan.joins is not None:
            self._last[plan.joins.slots] = POISON
            self._lens[plan.joins.slots] = plan.joins.context_lens
        if lost == "before":
            raise RuntimeError("lost before it began")
        common = self._common(plan)
        broken = -1 if self.nan_next is None else self.nan_next % len(plan.rows)
        self.nan_next = None
        rows = list(zip(plan.rows.tolist(), plan.q_lens.tolist(), plan.kv_lens.tolist(), owners, strict=True))
        start = 0
        for index, (slot, q_len, kv_len, owner) in enumerate(rows):
            if index < plan.num_decode:
                tokens = self._last[slot : slot + 1]
            else:
                tokens = plan.tokens[start : start + q_len]
                start += q_len
            is_nan = index == broken or self._reads_nan(slot, kv_len - q_len)
            for memory in self._memories:
                places = memory.places(slot, np.arange(kv_len - q_len, kv_len))
                memory.tokens[places], memory.owners[places], memory.is_nan[places] = tokens, owner, is_nan
        sampled = np.zeros((len(rows), 1), np.int32)
        failed = np.zeros(len(rows), bool)
        for index, (slot, q_len, kv_len, owner) in enumerate(rows):
            gap = int(self._lens[slot]) != kv_len - q_len
            self._lens[slot] = kv_len
            if plan.sample[index]:
                failed[index] = self._reads_nan(slot, kv_len)
                sampled[index, 0] = self._last[slot] = self._sampled(slot, q_len, kv_len, owner, gap, common[index])
        self.num_nan_rows += int(failed.sum())
        if lost == "after":
            raise RuntimeError("lost when it was done")
        return StepResult(sampled, None, failed if failed.any() else None)

    def _reads_nan(self, slot: int, length: int) -> bool:
        full = self._memories[0]
        return bool(full.is_nan[full.places(slot, np.arange(length))].any())

    def _common(self, plan: StepPlan) -> list[int]:
        """What each row reads through the pages of the first one that has any, as they were when the rows were new."""
        if plan.common_lens is None:
            return [0] * len(plan.rows)
        if plan.rows_version != self._common_version:
            self._common_version = plan.rows_version
            self._common_pages = self._memories[0].table[plan.rows[plan.common_lens.argmax()]].copy()
        assert plan.num_decode == len(plan.rows) and (plan.common_lens < plan.kv_lens).all()
        self.num_common_steps += 1
        return plan.common_lens.tolist()

    def _sampled(self, slot: int, q_len: int, kv_len: int, owner: int, gap: bool, common: int) -> int:
        full = self._memories[0]
        positions = np.arange(kv_len)
        places = full.places(slot, positions)
        places[0][:common] = self._common_pages[positions[:common] // full.page_size]
        tokens = full.tokens[places]
        num_wrong = int(gap) + int(np.count_nonzero((tokens == POISON) | (full.owners[places] != owner)))
        for memory in self._memories[1:]:
            # The first of the step's queries sees the window - 1 keys before it.
            seen = positions[max(0, kv_len - q_len - memory.group.window + 1) :]
            places = memory.places(slot, seen)
            differs = (memory.tokens[places] != tokens[seen]) | (memory.owners[places] != owner)
            num_wrong += int(np.count_nonzero(differs))
        return _token(int(_weights(positions, tokens).sum()) + (num_wrong << 40) * 0x2545F4914F6CDD1D)
