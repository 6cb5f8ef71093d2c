"""Who runs next: token budget, admission, chunked prefill, page reservation, retraction.

A step holds at most `step_tokens` tokens, and where rows decode `mixed_tokens`. Decode rows come first, then prompts in
the middle of their prefill, then waiting requests in the policy's order. While a prompt wants to move, decode rows
leave it a part of the step; while rows decode, prompts leave them theirs; and no more requests run than can each move
once in `max_step_gap` steps.
"""

from __future__ import annotations

import numpy as np

from scheduler_proc.admission import PREFILL_SHARE, Admission
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.common_prefix import LEAST_SHARE, common_lens
from scheduler_proc.options import PlannerOptions
from scheduler_proc.plan import PromptScores, StepPlan
from scheduler_proc.request import Request
from scheduler_proc.slots import DecodeRows, Slots, SlotState
from scheduler_proc.speculative.budget import DraftBudget

EARLY_TOKENS = 8
"""Room below which a row takes pages when others must, while most pages are free."""


class Planner:
    """Plans steps over `slots` and `cache`; `admission` owns the waiting queue and fills the slots."""

    def __init__(
        self,
        slots: Slots,
        cache: KvCache,
        eos_ids: tuple[int, ...],
        options: PlannerOptions,
        budget: DraftBudget | None = None,
    ) -> None:
        """budget: how many tokens are drafted; None: none."""
        assert not options.most_common_rows or cache.groups[0].kind == "full", "windows leave pages behind"
        self.slots = slots
        self.cache = cache
        self.options = options
        self.admission = Admission(slots, cache, eos_ids, options, self._retract)
        self.step = 0
        self.num_retractions = 0
        self._rows_version = 0
        self._stable: DecodeRows | None = None
        self._common_lens: np.ndarray | None = None
        """Of the rows of `_stable`, as long as nothing was shared since."""
        self._num_shares = -1
        self.budget = budget
        self._verified: tuple[DecodeRows, int] | None = None
        """Rows of the last plan with drafts, if all of them took part, and its rows_version."""
        self._q_ones = np.ones(slots.num_slots, np.int32)
        self._all_true = np.ones(slots.num_slots, bool)
        self._no_tokens = np.zeros(0, np.int32)
        self._checked_until = -1
        self._checked_rows: DecodeRows | None = None

    def release(
        self, slot: int, request: Request, num_tokens: int, keys: np.ndarray | None, *, broken: bool = False
    ) -> None:
        """Empty a slot; with `keys` its first `num_tokens` tokens stay in the prefix cache (see KvCache.end)."""
        self.cache.end(slot, request, num_tokens, keys, broken=broken)
        self.slots.leave(slot)
        if slot in self.admission.prefilling:
            self.admission.prefilling.remove(slot)
        self.admission.changed()

    # -- planning -------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """The next step, or None if no row can move."""
        decode = self.slots.decode()
        if self.budget is not None and not self.admission.prefilling and len(decode.rows):
            plan = self._plan_with_drafts(decode, self.budget)
            if plan is not None:
                return plan
        if not self.admission.prefilling and len(decode.rows) and self._all_may_go_on(decode):
            plan = self._steady_plan(decode)
        else:
            rows = self._choose_decode_rows(decode)
            chunk_rows, chunk_lens = self._choose_chunks(self.options.most_tokens(len(rows)) - len(rows))
            if len(rows) == 0 and not chunk_rows:
                return None
            plan = self._mixed_plan(rows, chunk_rows, chunk_lens)
            self.slots.last_step[plan.rows] = plan.step
        return plan

    def _all_may_go_on(self, decode: DecodeRows) -> bool:
        """Whether every decoding row takes part and has its page; makes the pages if that is all that is missing."""
        if len(decode.rows) > self.options.step_tokens:
            return False
        if self._checked_rows is decode and self.step < self._checked_until:
            return True
        slots, cache = self.slots, self.cache
        planned = slots.planned_of(decode)
        rest = int((slots.last_planned[decode.index] - planned).min())
        if rest <= 0:
            return False
        room = cache.room_left(decode.index, planned)
        least = int(room.min())
        if least <= 0:
            due = room <= 0
            if cache.is_roomy:
                due |= (room <= EARLY_TOKENS) & (planned + room < slots.full_len[decode.index])
            short = decode.rows[due]
            if not all(cache.make_room(group, len(short)) for group in range(len(cache.groups))):
                return False
            self._take_pages(short)
            least = int(cache.room_left(decode.index, planned).min())
        # Until the first row ends or fills its pages there is nothing to look at again.
        self._checked_rows, self._checked_until = decode, self.step + min(rest, least)
        return True

    def _steady_plan(self, decode: DecodeRows) -> StepPlan:
        """A step of all decode rows and nothing else: numpy only, the same work whatever the batch."""
        slots = self.slots
        num_shares = self.cache.tables[0].num_shares
        # What is found stays true as long as the rows stay. But what was a row's own may have become the tree's since.
        if self._stable is not decode or (self.options.most_common_rows and self._num_shares != num_shares):
            self._stable = decode
            self._rows_version += 1
            self._common_lens = self._found_common(decode.rows)
            self._num_shares = num_shares
        self.step += 1
        kv_lens = slots.plan_steady(decode, self.step)
        num = len(decode.rows)
        return StepPlan(
            step=self.step,
            rows=decode.rows,
            num_decode=num,
            q_lens=self._q_ones[:num],
            kv_lens=kv_lens,
            tokens=self._no_tokens,
            sample=self._all_true[:num],
            all_greedy=decode.all_greedy,
            needs_filter=decode.needs_filter,
            rows_version=self._rows_version,
            slots_version=slots.version,
            joins=slots.take_joins(),
            pages=self.cache.take_updates(),
            adjusts_logits=decode.adjusts_logits,
            logprobs=decode.logprobs,
            common_lens=self._common_lens,
        )

    def _plan_with_drafts(self, decode: DecodeRows, budget: DraftBudget) -> StepPlan | None:
        """A step in which all rows that may go on verify drafts; None where none pays, or there is no room for it."""
        slots = self.slots
        rows = decode.rows[slots.least_planned[decode.index] < slots.last_planned[decode.index]]
        most = int(slots.most_drafts[rows].max(initial=0))
        if most == 0 or len(rows) > self.options.most_drafting_rows:
            return None
        num_drafts = budget.choose(len(rows), min(most, self.options.step_tokens // len(rows) - 1))
        size = num_drafts + 1
        if num_drafts <= 0 or not self._make_room(rows, max(size, self.options.draft_places + 1)):
            return None
        is_all = len(rows) == len(decode.rows)
        if not is_all or self._verified != (decode, self._rows_version):
            self._rows_version += 1
        self._verified = (decode, self._rows_version) if is_all else None
        self._stable = self._checked_rows = None
        self.step += 1
        joins = slots.take_joins()
        kv_lens = slots.plan_drafts(rows, num_drafts)
        slots.last_step[rows] = self.step
        num = len(rows)
        return StepPlan(
            step=self.step,
            rows=rows,
            num_decode=num,
            q_lens=np.full(num, size, np.int32),
            kv_lens=kv_lens,
            tokens=self._no_tokens,
            sample=self._all_true[:num],
            all_greedy=decode.all_greedy,
            needs_filter=decode.needs_filter,
            rows_version=self._rows_version,
            slots_version=-1,
            joins=joins,
            pages=self.cache.take_updates(),
            adjusts_logits=bool(slots.adjusts[rows].any()),
            logprobs=slots.logprobs[rows] if (slots.logprobs[rows] >= 0).any() else None,
            num_drafts=num_drafts,
        )

    def _make_room(self, rows: np.ndarray, num_tokens: int) -> bool:
        """Pages for so many more tokens of each of `rows`, as far as their answers go, of those that are free: nobody's
        cached prefix goes for drafts, and nobody who runs. False if they would leave less than a page for each."""
        slots, cache = self.slots, self.cache
        ends = np.minimum(slots.planned[rows] + num_tokens, slots.full_len[rows] - 1)
        missing = np.maximum(-(-ends // cache.page_size) - cache.tables[0].num[rows], 0)
        if not missing.any():
            return True
        if int(missing.sum()) + slots.num_used > min(pool.num_free for pool in cache.pools):
            return False
        while len(short := rows[cache.room_left(rows, ends) < 0]):
            if any(pool.num_free < len(short) for pool in cache.pools):
                return False
            self._take_pages(short)
        return True

    def _found_common(self, rows: np.ndarray) -> np.ndarray | None:
        """StepPlan.common_lens, of a step of these rows alone."""
        if len(rows) > self.options.most_common_rows:
            return None
        least = max(self.options.least_common, int(self.slots.planned[rows].sum()) // LEAST_SHARE)
        return common_lens(self.cache.tables[0], rows, self.cache.page_size, least)

    def _choose_decode_rows(self, decode: DecodeRows) -> np.ndarray:
        slots, rows = self.slots, decode.rows
        rows = rows[slots.planned[rows] < slots.last_planned[rows]]
        if len(rows) == 0:
            return rows
        limit = self.options.step_tokens
        if self.admission.prefilling:
            share = -(-limit // PREFILL_SHARE)
            limit = limit - share if limit > share else (self.step + 1) % 2
        if len(rows) > limit:
            order = np.argsort(slots.last_step[rows], kind="stable")[:limit]
            rows = np.sort(rows[order])
        return self._reserve(rows)

    def _choose_chunks(self, budget: int) -> tuple[list[int], list[int]]:
        """Prompts that move in this step, oldest first, and how far; pages for them are taken."""
        slots, cache = self.slots, self.cache
        rows, lens = [], []
        for slot, share in zip(list(self.admission.prefilling), self._shares(budget), strict=True):
            start, end = int(slots.planned[slot]), int(slots.prefill_end[slot])
            length = min(budget, share)
            if length <= 0:
                continue
            # The last chunk samples, and the token after it wants a place.
            until = start + length + (start + length == end)
            if not cache.grow(slot, until):
                length = self._shorter_chunk(slot, start, length)
                if length <= 0:
                    continue
            rows.append(slot)
            lens.append(length)
            budget -= length
        if not rows and self.admission.prefilling and not cache.in_flight and len(self.slots.decode().rows) == 0:
            self._free_memory_for(self.admission.prefilling[0])
        return rows, lens

    def _shorter_chunk(self, slot: int, start: int, length: int) -> int:
        """What of a chunk fits into the pages that can be had now, in whole pages."""
        cache = self.cache
        room = min(cache.available(group) for group in range(len(cache.groups)))
        fits = (int(cache.tables[0].num[slot]) + room) * cache.page_size - start
        length = min(length - 1, fits)
        return length if length > 0 and cache.grow(slot, start + length) else 0

    def _mixed_plan(self, decode: np.ndarray, chunk_rows: list[int], chunk_lens: list[int]) -> StepPlan:
        slots = self.slots
        self.step += 1
        chunks = np.array(chunk_rows, np.int32)
        rows = np.concatenate([decode, chunks])
        q_lens = np.concatenate([self._q_ones[: len(decode)], np.array(chunk_lens, np.int32)])
        # Joins are taken before `planned` moves: they carry the context the slot begins with.
        joins = slots.take_joins()
        starts = slots.planned[chunks]
        self.cache.leave_window(chunks, slots.planned)
        tokens = [
            slots.tokens[slot, start : start + length]
            for slot, start, length in zip(chunk_rows, starts.tolist(), chunk_lens, strict=True)
        ]
        kv_lens = slots.planned[rows] + q_lens
        slots.planned[rows] = kv_lens
        done = kv_lens[len(decode) :] == slots.prefill_end[chunks]
        sample = np.concatenate([self._all_true[: len(decode)], done])
        for slot in chunks[done].tolist():
            slots.set_state(slot, SlotState.DECODE)
            self.admission.prefilling.remove(slot)
        sampling = rows[sample]
        wanted = np.where(sample, slots.logprobs[rows], -1)
        self._rows_version += 1
        self._stable = None
        return StepPlan(
            step=self.step,
            rows=rows,
            num_decode=len(decode),
            q_lens=q_lens,
            kv_lens=kv_lens,
            tokens=np.concatenate(tokens) if tokens else self._no_tokens,
            sample=sample,
            all_greedy=bool(slots.greedy[sampling].all()),
            needs_filter=bool(slots.filtered[sampling].any()),
            rows_version=self._rows_version,
            slots_version=-1,
            joins=joins,
            pages=self.cache.take_updates(),
            adjusts_logits=bool(slots.adjusts[sampling].any()),
            logprobs=wanted if (wanted >= 0).any() else None,
            prompt_scores=self._prompt_scores(len(decode), chunk_rows, starts.tolist(), chunk_lens),
            common_lens=None if chunk_rows else self._found_common(decode),
        )

    def _prompt_scores(
        self, num_decode: int, rows: list[int], starts: list[int], lens: list[int]
    ) -> tuple[PromptScores, ...]:
        """What of their prompts these chunks can score: a token's logits are those of the token before it."""
        scores = []
        for index, (slot, start, length) in enumerate(zip(rows, starts, lens, strict=True)):
            request = self.slots.occupant[slot]
            assert request is not None
            first = max(request.score_from, start + 1)
            end = min(start + length + 1, len(request.prompt_ids))
            if request.score_from >= 0 and first < end:
                width = max(request.sampling.logprobs, 0)
                targets = request.prompt_ids[first:end]
                scores.append(PromptScores(num_decode + index, first - 1 - start, targets, width))
        return tuple(scores)

    # -- memory ---------------------------------------------------------------------------------------------------

    def _reserve(self, rows: np.ndarray) -> np.ndarray:
        """Pages for one more token of each of `rows`; retracts requests until they suffice.

        Returns the rows that have their page; the others wait for pages in flight.
        """
        cache, slots = self.cache, self.slots
        short = rows[cache.room_left(rows, slots.planned[rows]) <= 0]
        while len(short):
            room = min(cache.available(group) for group in range(len(cache.groups)))
            if len(short) <= room:
                break
            victim = self._victim()
            if victim is None and not cache.in_flight and not slots.slack.any() and cache.drop_pin():
                continue
            # What steps in flight have verified may be less than was planned for: it is known soon.
            if cache.in_flight or victim is None or slots.slack.any():
                rows = rows[~np.isin(rows, short[room:])]
                short = short[:room]
            else:
                self._retract(victim)
                self.admission.estimate.ran_out()
                rows = rows[rows != victim]
                short = short[short != victim]
        if len(short):
            made = min(self._room_made(group, len(short)) for group in range(len(cache.groups)))
            if made < len(short):
                # Evicted pages that a running step still reads come free with it.
                rows = rows[~np.isin(rows, short[made:])]
                short = short[:made]
            self._take_pages(short)
        return rows

    def _room_made(self, group: int, num: int) -> int:
        self.cache.make_room(group, num)
        return min(num, self.cache.pools[group].num_free)

    def _take_pages(self, short: np.ndarray) -> None:
        slots = self.slots
        if self.cache.has_windows:
            self.cache.leave_window(short, slots.least_planned)
        self.cache.reserve(short, np.minimum(slots.full_len[short], slots.max_len))

    def _free_memory_for(self, oldest: int) -> None:
        """Nothing can move for lack of pages: retract the youngest request but never the oldest, or end a pin."""
        victim = self._victim()
        if victim is not None and victim != oldest:
            self._retract(victim)
            self.admission.estimate.ran_out()
        elif victim is None:
            self.cache.drop_pin()

    def _victim(self) -> int | None:
        """The running request whose retraction loses least: fewest produced tokens, youngest; never the oldest."""
        slots = self.slots
        running = np.flatnonzero((slots.state == SlotState.PREFILL) | (slots.state == SlotState.DECODE))
        if len(running) <= 1:
            return None
        oldest = running[np.argmin(slots.admitted[running])]
        others = running[running != oldest]
        produced = slots.num_known[others] - slots.prompt_len[others]
        return int(others[np.lexsort((-slots.admitted[others], produced))[0]])

    def _retract(self, slot: int) -> None:
        """Take a running request out of the batch; what it has computed stays in the tree, where it resumes."""
        slots = self.slots
        request = slots.occupant[slot]
        assert request is not None
        num_known = int(slots.num_known[slot])
        keys = slots.tokens[slot, :num_known].astype(np.int64)
        # A prompt whose last chunk is still in flight has nothing more to share than its chunks did.
        computed = num_known - 1 if slots.state[slot] == SlotState.DECODE and not slots.is_new[slot] else 0
        request.output_ids = slots.output_ids(slot)
        request.keys = keys
        request.num_retractions += 1
        request.num_drafted += int(slots.drafted[slot])
        request.num_accepted += int(slots.accepted[slot])
        self.num_retractions += 1
        self.release(slot, request, computed, keys if computed else None)
        self.admission.add(request)

    def _shares(self, budget: int) -> list[int]:
        """How the prompts of a step share `budget` tokens, of those in the middle of their prefill, oldest first.

        Half is the oldest's and an eighth the next one's; the rest is for who is nearest its end (by priority: for who
        came first). So a long prompt is held up by no more than its own length again, those behind it move too,
        and prompts of one length are done one after the other, the first as early as can be.
        """
        wanted = self.admission.wanted()
        shares = [0] * len(wanted)
        left = budget
        for index, part in ((0, 2), (1, 8)):
            if index < len(wanted):
                shares[index] = min(wanted[index], left, -(-budget // part))
                left -= shares[index]
        others = range(1, len(wanted))
        # Of equals the older one.
        for other in others if self.options.policy == "priority" else sorted(others, key=wanted.__getitem__):
            more = min(wanted[other] - shares[other], left)
            shares[other] += more
            left -= more
        if wanted:
            shares[0] += min(left, wanted[0] - shares[0])
        return shares
