"""Who is let in: the waiting queue, and the decision to give a request a slot."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from scheduler_proc.cache.groups import Node
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.estimate import OutputEstimate
from scheduler_proc.forecast import Forecast
from scheduler_proc.options import PlannerOptions
from scheduler_proc.policy import LOOKED_AT, effective_priority, make_order
from scheduler_proc.request import Request
from scheduler_proc.slots import Slots, SlotState

PREFILL_SHARE = 4
"""While a prompt waits, decode rows leave it at least 1 / PREFILL_SHARE of the step."""
MOST_PREFILLING = 8
"""Prompts that share a step before later ones must wait for tokens to be left over."""
SHARED_PREFIX = 32
"""A request waits for one just admitted if it can take over at least so many more tokens from it."""
LOOK_UP_TOKENS = 1000
"""Longer requests are looked up in a changing tree only every second, third, ... step: looking costs by the token."""
MOST_LEFT = 4096
"""Requests that left the queue, remembered one by one."""


class _Seen(NamedTuple):
    """What of a waiting request was cached, at a version of the tree; still good enough before step `due`."""

    version: int
    due: int
    num_tokens: int
    node: Node | None


class Admission:
    """Owns the waiting requests, and moves them into slots in the policy's order while memory is expected to last."""

    def __init__(
        self,
        slots: Slots,
        cache: KvCache,
        eos_ids: tuple[int, ...],
        options: PlannerOptions,
        retract: Callable[[int], None],
    ) -> None:
        """`retract` takes a running request out of its slot and puts it back into `waiting`."""
        self.slots = slots
        self.cache = cache
        self.options = options
        self.estimate = OutputEstimate(options.conservativeness)
        self.waiting: dict[int, Request] = {}
        """By request number, in no particular order."""
        self.prefilling: list[int] = []
        """Slots in the middle of their prefill, in order of admission."""
        self.admitting: Request | None = None
        """The request that admission works on: an exception there is its own."""
        self.num_admitted = 0
        self.max_rows = _max_rows(options)
        self._eos_ids = eos_ids
        self._retract = retract
        self._order = make_order(options.policy, self._cached, self._overtaken, options.seed, lambda: self.num_admitted)
        self._forecast: Forecast | None = None
        """Of the running batch, within one round of admissions."""
        self._blocked_at: tuple[int, int, int | None] | None = None
        """What admission depends on, as it was when nobody could be admitted: nothing to try until it changes.

        None for the pages: the first one found no slot, nor anybody to take one from; pages would not help.
        """
        self._blocked: Request | None = None
        """The first in the order then, which could not be admitted."""
        self._changes = 0
        self._left: list[int] = []
        """Arrivals, sorted, of those that left the queue without being admitted, while others wait."""
        self._seen: dict[int, _Seen] = {}
        """What the order knows of waiting requests, by number."""
        self._awaited: dict[int, tuple[Request, int]] = {}
        """Whose prefill a waiting request waits for, by its number, and how many tokens they share."""

    @property
    def num_queued(self) -> int:
        """Waiting requests, but for those that have only just come and will find a slot in the next step."""
        if self._is_blocked or not self._may_start():
            return len(self.waiting)
        return max(0, len(self.waiting) - self._num_takeable)

    @property
    def _num_takeable(self) -> int:
        """Slots that are free and may be used."""
        return max(0, min(self.slots.num_free, self.max_rows - self.slots.num_used))

    def changed(self) -> None:
        """Somebody came or went: who did not fit may fit now."""
        self._changes += 1

    def add(self, request: Request) -> None:
        """Queue a request, a new one or one that was retracted."""
        num_before = len(self.waiting)
        if request.num_retractions:
            num_before = sum(other.arrival < request.arrival for other in self.waiting.values())
        request.ahead = self.num_admitted + num_before + bisect_left(self._left, request.arrival)
        self.waiting[request.request] = request
        if not self._stands_behind_blocked(request):
            self._changes += 1

    def remove(self, request: Request) -> None:
        """A request leaves the queue for good; no news if it is not there."""
        if self.waiting.pop(request.request, None) is None:
            return
        self._changes += 1
        insort(self._left, request.arrival)
        self._forget(request)
        if len(self._left) > MOST_LEFT:
            for other in self.waiting.values():
                other.ahead -= bisect_left(self._left, other.arrival)
            self._left.clear()

    def _forget(self, request: Request) -> None:
        """A request has left the queue."""
        self._seen.pop(request.request, None)
        self._awaited.pop(request.request, None)
        if not self.waiting:
            self._left.clear()

    def _stands_behind_blocked(self, request: Request) -> bool:
        """Whether the order has it behind the one that could not be admitted: it changes nothing for that one."""
        blocked = self._blocked
        if blocked is None or blocked.request not in self.waiting or self.options.policy not in ("fcfs", "priority"):
            return False
        if self.options.policy == "priority":
            mine = effective_priority(request, self._overtaken(request))
            theirs = effective_priority(blocked, self._overtaken(blocked))
            if mine != theirs:
                return mine < theirs
        return request.arrival > blocked.arrival

    def _overtaken(self, request: Request) -> int:
        """Admissions since it was queued, beyond those of the requests that waited before it and did not leave."""
        num_left = bisect_left(self._left, request.arrival) if self._left else 0
        return max(0, self.num_admitted + num_left - request.ahead)

    def _cached(self, request: Request) -> tuple[int, Node | None]:
        """What is cached of a waiting request, or was a moment ago: what the order goes by."""
        cache = self.cache
        if cache.tree is None:
            return 0, None
        seen = self._seen.get(request.request)
        if seen is None or (seen.version != cache.tree.version and seen.due <= cache.last_collected):
            num_tokens, node = cache.look_up(request)
            pause = request.num_known // LOOK_UP_TOKENS
            # Those that came together do not all come due together.
            due = cache.last_collected + pause + request.arrival % (pause + 1)
            seen = self._seen[request.request] = _Seen(cache.tree.version, due, num_tokens, node)
        return seen.num_tokens, seen.node

    def admit(self, now_ns: int) -> None:
        """Move waiting requests into slots while slots, pages and the step's tokens last."""
        if self._is_blocked:
            return
        if not self._may_start() or not (self._num_takeable or self.options.policy == "priority"):
            return
        fresh: dict[bytes, list[Request]] = {}
        for slot in self.prefilling:
            occupant = self.slots.occupant[slot]
            assert occupant is not None
            fresh.setdefault(occupant.first_page, []).append(occupant)
        self._forecast = None
        self._blocked_at = self._blocked = None
        for request in self._order(list(self.waiting.values()))[:LOOKED_AT]:
            if not self._may_start():
                break
            if request.request not in self.waiting:
                continue
            self.admitting = request
            if self._waits_for_prefix(request, fresh.get(request.first_page, ())):
                continue
            if not (self._has_slot(request) and self._try_admit(request, now_ns)):
                self._block(request)
                break
            fresh.setdefault(request.first_page, []).append(request)
        self.admitting = None

    @property
    def _is_blocked(self) -> bool:
        """Nothing has changed since nobody could be admitted."""
        at = self._blocked_at
        if at is None or at[:2] != (self._changes, self.slots.version):
            return False
        return at[2] is None or at[2] == self.cache.available(0)

    def _block(self, request: Request) -> None:
        """The first in the order cannot be admitted: nobody is tried until something changes."""
        only_slots = not self._num_takeable
        if only_slots and self.options.policy == "priority":
            only_slots = not self._victims_for(request)
        pages = None if only_slots else self.cache.available(0)
        self._blocked_at, self._blocked = (self._changes, self.slots.version, pages), request

    def _try_admit(self, request: Request, now_ns: int) -> bool:
        """Give a request a slot if memory is expected to last; else change nothing."""
        cache, slots = self.cache, self.slots
        match = cache.match(request)
        lock = cache.hold(match)
        cached = 0 if match is None else match.num_tokens
        if not (self._fits(request, cached) or self._make_way(request, cached)):
            cache.let_go(lock)
            return False
        slot = -1
        try:
            slot = slots.join(request, self._eos_ids, cached)
            cache.begin(slot, match, lock)
        except Exception:
            if slot >= 0:
                slots.leave(slot)
            cache.let_go(lock)
            raise
        del self.waiting[request.request]
        self._forget(request)
        if self._forecast is not None:
            self._forecast.add(request.num_known, self._rest_of(request), cached // cache.page_size)
        self.prefilling.append(slot)
        self._changes += 1
        self.num_admitted += 1
        if request.cached_tokens < 0:
            request.cached_tokens = min(cached, len(request.prompt_ids))
        if not request.stamps.first_scheduled:
            request.stamps.first_scheduled = now_ns
        return True

    def _fits(self, request: Request, cached: int) -> bool:
        """Whether the request's prompt and expected answer fit beside what the running ones are expected to need."""
        available = self.cache.available(0)
        if self.slots.num_used == 0:
            return self._fits_alone(request, cached, available)
        if self._forecast is None:
            self._forecast = self._forecast_of(self.slots.used())
        return self._forecast.fits(request.num_known, self._rest_of(request), cached // self.cache.page_size, available)

    def _fits_alone(self, request: Request, cached: int, available: int) -> bool:
        cache = self.cache
        return cache.pages_for(request.num_known + 1) - cached // cache.page_size <= available

    def _make_way(self, request: Request, cached: int) -> bool:
        """Take pages from pins, if nothing else is in the way, or from less important requests; whether it fits now."""
        if self.slots.num_used == 0:
            while not self.cache.in_flight and self.cache.drop_pin():
                if self._fits(request, cached):
                    return True
            return False
        victims = self._victims_for(request) if self.options.policy == "priority" else []
        for num in range(len(victims) + 1):
            if self._would_fit(request, cached, victims[:num]):
                for slot in victims[:num]:
                    self._retract_slot(slot)
                # Pages that a running step still reads come free with it: until then nobody else has to go.
                return num > 0 and self._fits(request, cached)
        return False

    def _would_fit(self, request: Request, cached: int, victims: list[int]) -> bool:
        """Whether the request fits once the steps in flight are collected and the slots `victims` are empty."""
        cache = self.cache
        available = cache.available(0) + cache.pools[0].num_in_flight + sum(map(cache.num_own, victims))
        used = np.setdiff1d(self.slots.used(), victims)
        if len(used) == 0:
            return self._fits_alone(request, cached, available)
        forecast = self._forecast_of(used)
        return forecast.fits(request.num_known, self._rest_of(request), cached // cache.page_size, available)

    def _rest_of(self, request: Request) -> int:
        produced = np.array([len(request.output_ids)])
        return int(self.estimate.remaining(np.array([request.max_output]), produced)[0])

    def _forecast_of(self, used: np.ndarray) -> Forecast:
        slots, table = self.slots, self.cache.tables[0]
        known = slots.num_known[used].astype(np.int64)
        produced = known - slots.prompt_len[used]
        rest = self.estimate.remaining(slots.full_len[used] - slots.prompt_len[used], produced)
        return Forecast(self.cache.page_size, known, rest, table.num[used], table.shared[used])

    def _waits_for_prefix(self, request: Request, fresh: Sequence[Request]) -> bool:
        """Whether a prompt that is being computed right now will spare this request a good part of its own.

        fresh: requests in their prefill whose first page is this request's.
        """
        if self.cache.tree is None:
            return False
        awaited = self._awaited.get(request.request)
        if awaited is not None:
            if self._goes_on_for(*awaited):
                return True
            del self._awaited[request.request]
        mine: int | None = None
        for other in fresh:
            length = min(len(other.keys), len(request.keys) - 1)
            differs = np.flatnonzero(other.keys[:length] != request.keys[:length])
            shared = int(differs[0]) if len(differs) else length
            shared -= shared % self.cache.page_size
            if shared < SHARED_PREFIX:
                continue
            if mine is None:
                mine = self._cached(request)[0]
            if shared - mine >= SHARED_PREFIX:
                self._awaited[request.request] = other, shared
                return True
        return False

    def _goes_on_for(self, other: Request, shared: int) -> bool:
        """Whether a request still computes a good part of the `shared` tokens that somebody wants to take over."""
        if other.slot < 0 or self.slots.state[other.slot] != SlotState.PREFILL:
            return False
        return shared - self.cache.num_shared(other.slot) >= SHARED_PREFIX

    def _has_slot(self, request: Request) -> bool:
        """A slot is free, or the least important occupant made way for somebody far more important."""
        if self._num_takeable:
            return True
        if self.options.policy != "priority":
            return False
        victims = self._victims_for(request)
        if not victims or not self._would_fit(request, self.cache.look_up(request)[0], victims):
            return False
        self._retract_slot(victims[0])
        return True

    def _victims_for(self, request: Request) -> list[int]:
        """Slots that may be taken from their occupants for this request, the least important first."""
        slots = self.slots
        most = effective_priority(request, self._overtaken(request)) - self.options.preemption_threshold
        running = [r for r in slots.occupant if r is not None and slots.state[r.slot] != SlotState.HELD]
        least = [r for r in running if r.priority < most]
        least.sort(key=lambda r: (r.priority, -int(slots.admitted[r.slot])))
        return [r.slot for r in least]

    def _retract_slot(self, slot: int) -> None:
        self._retract(slot)
        self._forecast = None

    def wanted(self) -> list[int]:
        """What each prompt in the middle of its prefill could take of a step, oldest first."""
        slots, rows = self.slots, self.prefilling
        rest = np.minimum(slots.prefill_end[rows] - slots.planned[rows], self.options.chunk_tokens)
        return rest.tolist()

    def audit(self, requests: dict[int, Request]) -> list[str]:
        """One line for each of `requests`, all there are, that is not in exactly one place, and for strangers there."""
        slots = self.slots
        problems = []
        occupants = {slot: request for slot, request in enumerate(slots.occupant) if request is not None}
        if sorted(occupants) != slots.used().tolist() or len(occupants) != slots.num_used:
            problems.append(f"{len(occupants)} slots have an occupant, {slots.num_used} are in use")
        for slot, request in occupants.items():
            if request.slot != slot:
                problems.append(f"slot {slot}: its occupant {request.request} is in slot {request.slot}")
            if requests.get(request.request) is not request:
                problems.append(f"slot {slot}: its occupant {request.request} has ended")
        for number, request in requests.items():
            if (number in self.waiting) == (request.slot >= 0 and occupants.get(request.slot) is request):
                problems.append(f"request {number}: not in one place, queue or slot")
        problems += [f"request {number}: waits, but has ended" for number in self.waiting if number not in requests]
        if any(occupants.get(slot) is None for slot in self.prefilling):
            problems.append("a free slot is in its prefill")
        return problems

    def _may_start(self) -> bool:
        """Whether another prompt would move in the next step: there are tokens left, or the others can make room."""
        if not self.prefilling:
            return True
        num_decode = len(self.slots.decode().rows)
        room = self.options.most_tokens(num_decode) - num_decode
        return len(self.prefilling) < MOST_PREFILLING or sum(self.wanted()) < room


def _max_rows(options: PlannerOptions) -> int:
    """Requests that can each move once in max_step_gap steps, prompts taking their share."""
    budget, gap = options.step_tokens, options.max_step_gap
    share = -(-budget // PREFILL_SHARE)
    return max(1, gap * (budget - share) if budget > share else gap // 2)
