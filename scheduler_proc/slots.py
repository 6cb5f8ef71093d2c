"""The running batch as arrays: one entry per slot, fixed length max_running_requests (struct of arrays).

Lengths count tokens. `planned` and `planned_output` run ahead of what was collected by the steps in flight; with
them the planner never asks a device for a length.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from engine.sampling import MAX_STOP_IDS
from scheduler_proc.plan import Joins, PageUpdates
from scheduler_proc.request import Request


class SlotState(IntEnum):
    FREE = 0
    PREFILL = 1
    DECODE = 2
    HELD = 3
    """Ended, but its text may still end earlier: waits for the detokenizer's Stop."""


class Slots:
    """Host slots. The planner changes them when it plans, the workload when it absorbs a result."""

    def __init__(self, num_slots: int, max_len: int, page_size: int, num_eos: int) -> None:
        self.num_slots = num_slots
        self.max_len = max_len
        self.page_size = page_size
        i32 = np.int32
        self.state = np.zeros(num_slots, np.uint8)
        self.request = np.zeros(num_slots, np.uint64)
        self.attempt = np.zeros(num_slots, i32)
        self.epoch = np.zeros(num_slots, np.int64)
        """Counts occupants, so that a result of an earlier one is told apart."""
        self.prompt_len = np.zeros(num_slots, i32)
        self.num_known = np.zeros(num_slots, i32)
        """Tokens the host knows: prompt and collected output."""
        self.prefill_end = np.zeros(num_slots, i32)
        """Tokens to prefill before sampling begins."""
        self.planned = np.zeros(num_slots, i32)
        """Tokens whose KV is written once all launched steps are done."""
        self.num_output = np.zeros(num_slots, i32)
        self.planned_output = np.zeros(num_slots, i32)
        self.max_output = np.zeros(num_slots, i32)
        self.last_step = np.zeros(num_slots, np.int64)
        """Step that gave the row its last tokens: who waited longest goes first when a step is too small for all."""
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS + num_eos), -1, i32)
        self.greedy = np.zeros(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.holds_end = np.zeros(num_slots, bool)
        self.is_new = np.zeros(num_slots, bool)
        """No token of this occupant was collected yet."""
        self.num_pages = np.zeros(num_slots, i32)
        # Virtual until touched: a row costs memory only for the tokens it really held.
        self.page_table = np.zeros((num_slots, -(-max_len // page_size)), i32)
        self.tokens = np.empty((num_slots, max_len + 1), i32)
        self.occupant: list[Request | None] = [None] * num_slots
        self.version = 0
        """Changes whenever the set of decoding rows does."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._decode_rows = np.zeros(0, i32)
        self._decode_version = -1
        self._joins: list[int] = []
        self._page_updates: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def rows(self, state: SlotState) -> np.ndarray:
        """int32: slots in `state`, ascending."""
        return np.flatnonzero(self.state == state).astype(np.int32)

    def decode_rows(self) -> np.ndarray:
        """int32: the decoding slots; the same array as long as `version` stays."""
        if self._decode_version != self.version:
            self._decode_rows = self.rows(SlotState.DECODE)
            self._decode_version = self.version
        return self._decode_rows

    def join(self, request: Request, eos_ids: tuple[int, ...], context_len: int = 0) -> int:
        """Give `request` a free slot, with `context_len` tokens already cached; returns the slot."""
        slot = self._free.pop()
        sampling = request.sampling
        num_prompt = len(request.prompt_ids)
        num_known = request.num_known
        stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids)
        self.state[slot] = SlotState.PREFILL
        self.request[slot] = request.request
        self.attempt[slot] = request.attempt
        self.prompt_len[slot] = num_prompt
        self.num_known[slot] = num_known
        self.prefill_end[slot] = num_known
        self.planned[slot] = context_len
        self.num_output[slot] = self.planned_output[slot] = len(request.output_ids)
        self.max_output[slot] = request.max_output
        self.last_step[slot] = 0
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.greedy[slot] = sampling.greedy
        self.filtered[slot] = not sampling.greedy and (
            sampling.top_k != -1 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )
        self.holds_end[slot] = bool(sampling.stop)
        self.is_new[slot] = True
        self.num_pages[slot] = 0
        self.tokens[slot, :num_prompt] = request.prompt_ids
        self.tokens[slot, num_prompt:num_known] = request.output_ids
        self.occupant[slot] = request
        request.slot = slot
        self._joins.append(slot)
        return slot

    def leave(self, slot: int) -> np.ndarray:
        """Empty a slot; returns its pages (int32), which the caller gives back to the pool."""
        pages = self.page_table[slot, : self.num_pages[slot]].copy()
        request = self.occupant[slot]
        assert request is not None, "slots: leaving a free slot"
        request.slot = -1
        self.occupant[slot] = None
        self.state[slot] = SlotState.FREE
        self.num_pages[slot] = 0
        self.epoch[slot] += 1
        self.version += 1
        self._free.append(slot)
        self._forget_untold(slot)
        return pages

    def _forget_untold(self, slot: int) -> None:
        """Drop what the device was not told yet of a slot, so that no update names an entry twice."""
        if slot in self._joins:
            self._joins.remove(slot)
        if self._page_updates:
            kept = [
                tuple(part[slots != slot] for part in (slots, columns, pages))
                for slots, columns, pages in self._page_updates
            ]
            self._page_updates = [(s, c, p) for s, c, p in kept if len(s)]

    def set_state(self, slot: int, state: SlotState) -> None:
        self.state[slot] = state
        self.version += 1

    def append_pages(self, rows: np.ndarray, pages: np.ndarray) -> None:
        """One more page for each of `rows` (distinct slots), int32 [m] each."""
        columns = self.num_pages[rows]
        self.page_table[rows, columns] = pages
        self.num_pages[rows] = columns + 1
        self._page_updates.append((rows, columns, pages))

    def extend_pages(self, slot: int, pages: np.ndarray) -> None:
        """Several more pages for one slot."""
        start = int(self.num_pages[slot])
        columns = np.arange(start, start + len(pages), dtype=np.int32)
        self.page_table[slot, columns] = pages
        self.num_pages[slot] = start + len(pages)
        self._page_updates.append((np.full(len(pages), slot, np.int32), columns, pages))

    def take_joins(self) -> Joins | None:
        """What the device must hear of new occupants; each is told once."""
        if not self._joins:
            return None
        slots, self._joins = self._joins, []
        sampling = []
        for slot in slots:
            request = self.occupant[slot]
            assert request is not None
            sampling.append(request.sampling)
        return Joins(
            slots=np.array(slots, np.int32),
            context_lens=self.planned[slots],
            temperature=np.array([0.0 if s.greedy else s.temperature for s in sampling], np.float32),
            top_p=np.array([s.top_p for s in sampling], np.float32),
            top_k=np.array([s.top_k for s in sampling], np.int32),
            min_p=np.array([s.min_p for s in sampling], np.float32),
            seeds=np.array([s.seed or 0 for s in sampling], np.int64),
        )

    def take_page_updates(self) -> PageUpdates | None:
        """What the device must hear of new pages; each is told once."""
        updates, self._page_updates = self._page_updates, []
        if not updates:
            return None
        if len(updates) == 1:
            return PageUpdates(*updates[0])
        return PageUpdates(*(np.concatenate(part) for part in zip(*updates, strict=True)))

    def output_ids(self, slot: int) -> np.ndarray:
        """int32: the collected output of a slot."""
        start = int(self.prompt_len[slot])
        return self.tokens[slot, start : start + int(self.num_output[slot])].copy()

    def tails(self) -> dict[str, np.ndarray]:
        """Owner name -> pages, for the page pool's audit."""
        return {
            f"slot {slot} (request {self.request[slot]})": self.page_table[slot, : self.num_pages[slot]]
            for slot in np.flatnonzero(self.state != SlotState.FREE)
        }
