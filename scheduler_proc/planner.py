"""Who runs next: token budget, admission, chunked prefill, page reservation, retraction. First come, first served.

A step holds at most `chunked_prefill_size` tokens. Decode rows come first, then prompts in the middle of their
prefill, then waiting requests. While a prompt wants to move, decode rows leave it a part of the step; while rows
decode, prompts leave them theirs: neither side stands still.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from scheduler_proc.cache.page_pool import PagePool
from scheduler_proc.plan import StepPlan
from scheduler_proc.request import Request
from scheduler_proc.slots import Slots, SlotState

RESERVED_TOKENS = 16
"""Tokens ahead for which a decoding row reserves pages, so that a steady step uploads nothing."""
EXPECTED_OUTPUT = 128
"""Output tokens that admission keeps room for, per request; retraction covers the rest."""
PREFILL_SHARE = 4
"""While a prompt waits, decode rows leave it at least 1 / PREFILL_SHARE of the step."""


class Planner:
    """Plans steps over `slots` and `pool`; owns the waiting queue."""

    def __init__(self, slots: Slots, pool: PagePool, step_tokens: int, eos_ids: tuple[int, ...]) -> None:
        self.slots = slots
        self.pool = pool
        self.step_tokens = step_tokens
        self.eos_ids = eos_ids
        self.waiting: deque[Request] = deque()
        self.admitting: Request | None = None
        """The request that admission works on: an exception there is its own."""
        self.step = 0
        self.newest_in_flight: int | None = None
        """Newest launched step whose result was not collected; None = the device is idle."""
        self.num_retractions = 0
        self._rows_version = 0
        self._prefilling: list[int] = []
        """Slots in the middle of their prefill, in order of admission."""
        self._admitted_at: dict[int, int] = {}
        self._num_admitted = 0
        self._stable_key: tuple[int, int] = (-1, -1)
        self._q_ones = np.ones(slots.num_slots, np.int32)
        self._all_true = np.ones(slots.num_slots, bool)
        self._no_tokens = np.zeros(0, np.int32)

    # -- the queue ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def remove_waiting(self, request: Request) -> None:
        self.waiting.remove(request)

    def release(self, slot: int) -> None:
        """Empty a slot; its pages are free once the steps in flight are done."""
        self.pool.give_back(self.slots.leave(slot), self.newest_in_flight)
        self._admitted_at.pop(slot, None)
        if slot in self._prefilling:
            self._prefilling.remove(slot)

    # -- planning -------------------------------------------------------------------------------------------------

    def admit(self, now_ns: int) -> None:
        """Move waiting requests into slots while slots, pages and the step's tokens last."""
        slots, pool = self.slots, self.pool
        if not self.waiting or not slots.num_free:
            return
        budget = self.step_tokens - self._pending_prefill_tokens()
        promised = self._expected_growth()
        while self.waiting and slots.num_free and budget > 0:
            request = self.waiting[0]
            self.admitting = request
            remaining = request.max_output - len(request.output_ids)
            needed = pool.pages_for(request.num_known + min(remaining, EXPECTED_OUTPUT))
            at_once = pool.pages_for(request.num_known + 1)
            alone = slots.num_used == 0
            if pool.num_free < (at_once if alone else needed + promised):
                break
            self.waiting.popleft()
            slot = slots.join(request, self.eos_ids)
            slots.extend_pages(slot, pool.take(at_once))
            self._prefilling.append(slot)
            self._admitted_at[slot] = self._num_admitted
            self._num_admitted += 1
            if not request.stamps.first_scheduled:
                request.stamps.first_scheduled = now_ns
            promised += needed - at_once
            budget -= request.num_known
        self.admitting = None

    def plan(self) -> StepPlan | None:
        """The next step, or None if no row can move."""
        rows = self._choose_decode_rows()
        if len(rows):
            rows = self._reserve(rows)
        chunk_rows, chunk_lens = self._choose_chunks(self.step_tokens - len(rows))
        if len(rows) == 0 and not chunk_rows:
            return None
        self.step += 1
        plan = self._decode_plan(rows) if not chunk_rows else self._mixed_plan(rows, chunk_rows, chunk_lens)
        self.slots.last_step[plan.rows] = self.step
        return plan

    def _choose_decode_rows(self) -> np.ndarray:
        slots = self.slots
        rows = slots.decode_rows()
        if len(rows) == 0:
            return rows
        wants = slots.planned_output[rows] < slots.max_output[rows]
        if not wants.all():
            rows = rows[wants]
        limit = self.step_tokens
        if self._prefilling:
            share = -(-limit // PREFILL_SHARE)
            limit = limit - share if limit > share else (self.step + 1) % 2
        if len(rows) > limit:
            order = np.argsort(slots.last_step[rows], kind="stable")[:limit]
            rows = np.sort(rows[order])
        return rows

    def _choose_chunks(self, budget: int) -> tuple[list[int], list[int]]:
        rows, lens = [], []
        for slot in self._prefilling:
            if budget <= 0:
                break
            length = min(budget, int(self.slots.prefill_end[slot] - self.slots.planned[slot]))
            rows.append(slot)
            lens.append(length)
            budget -= length
        return rows, lens

    def _decode_plan(self, rows: np.ndarray) -> StepPlan:
        """A step of decode rows alone: the steady state, numpy only."""
        slots = self.slots
        key = (slots.version, len(rows))
        if key != self._stable_key or rows is not slots.decode_rows():
            self._rows_version += 1
            self._stable_key = key if rows is slots.decode_rows() else (-1, -1)
        kv_lens = slots.planned[rows] + 1
        slots.planned[rows] = kv_lens
        slots.planned_output[rows] += 1
        num = len(rows)
        return StepPlan(
            step=self.step,
            rows=rows,
            num_decode=num,
            q_lens=self._q_ones[:num],
            kv_lens=kv_lens,
            tokens=self._no_tokens,
            sample=self._all_true[:num],
            all_greedy=bool(slots.greedy[rows].all()),
            needs_filter=bool(slots.filtered[rows].any()),
            rows_version=self._rows_version,
            joins=slots.take_joins(),
            pages=slots.take_page_updates(),
        )

    def _mixed_plan(self, decode: np.ndarray, chunk_rows: list[int], chunk_lens: list[int]) -> StepPlan:
        slots = self.slots
        chunks = np.array(chunk_rows, np.int32)
        rows = np.concatenate([decode, chunks])
        q_lens = np.concatenate([self._q_ones[: len(decode)], np.array(chunk_lens, np.int32)])
        # Joins are taken before `planned` moves: they carry the context the slot begins with.
        joins = slots.take_joins()
        starts = slots.planned[chunks]
        tokens = [
            slots.tokens[slot, start : start + length]
            for slot, start, length in zip(chunk_rows, starts.tolist(), chunk_lens, strict=True)
        ]
        kv_lens = slots.planned[rows] + q_lens
        slots.planned[rows] = kv_lens
        done = kv_lens[len(decode) :] == slots.prefill_end[chunks]
        sample = np.concatenate([self._all_true[: len(decode)], done])
        slots.planned_output[rows[sample]] += 1
        for slot in chunks[done].tolist():
            slots.set_state(slot, SlotState.DECODE)
            self._prefilling.remove(slot)
        sampling = rows[sample]
        self._rows_version += 1
        self._stable_key = (-1, -1)
        return StepPlan(
            step=self.step,
            rows=rows,
            num_decode=len(decode),
            q_lens=q_lens,
            kv_lens=kv_lens,
            tokens=np.concatenate(tokens),
            sample=sample,
            all_greedy=bool(slots.greedy[sampling].all()),
            needs_filter=bool(slots.filtered[sampling].any()),
            rows_version=self._rows_version,
            joins=joins,
            pages=slots.take_page_updates(),
        )

    # -- pages ----------------------------------------------------------------------------------------------------

    def _reserve(self, rows: np.ndarray) -> np.ndarray:
        """Pages for one more token of each of `rows`; retracts the youngest requests until they suffice.

        Returns the rows that have their page; the others wait for pages in flight.
        """
        slots, pool = self.slots, self.pool
        short = rows[slots.planned[rows] + 1 > slots.num_pages[rows] * pool.page_size]
        if len(short) == 0:
            return rows
        while len(short) > pool.num_free:
            victim = self._youngest()
            if pool.num_in_flight or victim is None:
                waits = short[pool.num_free :]
                rows = rows[~np.isin(rows, waits)]
                short = short[: pool.num_free]
            else:
                self._retract(victim)
                rows = rows[rows != victim]
                short = short[short != victim]
        for ahead in range(max(1, RESERVED_TOKENS // pool.page_size)):
            if ahead:
                short = short[self._may_grow(short)]
            if len(short) == 0 or len(short) > pool.num_free:
                break
            slots.append_pages(short, pool.take(len(short)))
        return rows

    def _may_grow(self, rows: np.ndarray) -> np.ndarray:
        """bool: rows whose answer may still grow beyond their pages."""
        slots = self.slots
        longest = np.minimum(slots.prompt_len[rows] + slots.max_output[rows], slots.max_len)
        return slots.num_pages[rows] * self.pool.page_size < longest

    def _youngest(self) -> int | None:
        """Slot of the request admitted last; None if at most one is left to choose from."""
        running = [slot for slot in self._admitted_at if self.slots.state[slot] != SlotState.HELD]
        return max(running, key=self._admitted_at.__getitem__) if len(running) > 1 else None

    def _retract(self, slot: int) -> None:
        """Take a running request out of the batch, first in the queue; it resumes from what it has produced."""
        request = self.slots.occupant[slot]
        assert request is not None
        request.output_ids = self.slots.output_ids(slot)
        request.num_retractions += 1
        self.num_retractions += 1
        self.release(slot)
        self.waiting.appendleft(request)

    def _pending_prefill_tokens(self) -> int:
        slots = self.slots
        rows = self._prefilling
        return int((slots.prefill_end[rows] - slots.planned[rows]).sum()) if rows else 0

    def _expected_growth(self) -> int:
        """Pages that the running requests are expected to need beyond those they hold."""
        slots = self.slots
        rows = np.flatnonzero(slots.state != SlotState.FREE)
        remaining = np.minimum(slots.max_output[rows] - slots.num_output[rows], EXPECTED_OUTPUT)
        final = slots.num_known[rows] + remaining
        pages = -(-final // self.pool.page_size)
        return int(np.maximum(pages - slots.num_pages[rows], 0).sum())
