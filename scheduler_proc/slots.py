"""The running batch as arrays: one entry per slot, fixed length max_running_requests (struct of arrays).

Lengths count tokens. `planned` runs ahead of what was collected by the steps in flight; with it the planner never asks
a device for a length. A row decodes until `planned` reaches `last_planned`, and its answer is full when `num_known`
reaches `full_len`; how many tokens it has produced follows from `num_known - prompt_len`.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from engine.sampling import MAX_STOP_IDS, SamplingParams
from scheduler_proc.plan import Adjustment, Drafting, Joins
from scheduler_proc.request import Request
from scheduler_proc.steady import CollectedRun, PlannedRun
from scheduler_proc.virtual_array import virtual_array


class SlotState(IntEnum):
    FREE = 0
    PREFILL = 1
    DECODE = 2
    HELD = 3
    """Ended, but its text may still end earlier: waits for the detokenizer's Stop."""


class SamplingValues:
    """What a device needs of each slot's sampling parameters, as Joins carries it."""

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, -1, np.int32)
        self.min_p = np.zeros(num_slots, np.float32)
        self.seeds = np.zeros(num_slots, np.int64)

    def set(self, slot: int, sampling: SamplingParams) -> None:
        self.temperature[slot] = 0.0 if sampling.greedy else sampling.temperature
        self.top_p[slot] = sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.min_p[slot] = sampling.min_p
        self.seeds[slot] = sampling.seed or 0


class DecodeRows:
    """The decoding slots of one version, and what follows from them alone."""

    def __init__(self, slots: Slots) -> None:
        self.version = slots.version
        self.rows = np.flatnonzero(slots.state == SlotState.DECODE).astype(np.int32)
        num = len(self.rows)
        self.index: np.ndarray | slice = self.rows.astype(np.intp)
        """What to index arrays with: a slice where the slots stand side by side, which numpy reads far faster."""
        if num and int(self.rows[-1]) - int(self.rows[0]) == num - 1:
            self.index = slice(int(self.rows[0]), int(self.rows[-1]) + 1)
        self.all_greedy = bool(slots.greedy[self.index].all())
        self.needs_filter = bool(slots.filtered[self.index].any())
        self.stop_ids = slots.stop_ids[self.index, : int(slots.num_stop_ids[self.index].max(initial=0))].copy()
        """int32 [n, widest]: the ids that end each row, -1 where it has fewer."""
        self.adjusts_logits = bool(slots.adjusts[self.index].any())
        wanted = slots.logprobs[self.index]
        self.logprobs = wanted.copy() if (wanted >= 0).any() else None
        self.requests = slots.request[self.index].copy()
        self.attempts = slots.attempt[self.index].copy()
        self.epochs = slots.epoch[self.index].copy()


class Slots:
    """Host slots. The planner changes them when it plans, the workload when it absorbs a result."""

    def __init__(self, num_slots: int, max_len: int, num_eos: int, max_drafts: int = 0) -> None:
        """max_drafts: drafted tokens of a row in a step at most; 0 = nobody drafts."""
        self.num_slots = num_slots
        self.max_drafts = max_drafts
        self.max_len = max_len
        i32 = np.int32
        self.state = np.zeros(num_slots, np.uint8)
        self.request = np.zeros(num_slots, np.uint64)
        self.attempt = np.zeros(num_slots, i32)
        self.epoch = np.zeros(num_slots, np.int64)
        """Counts occupants, so that a result of an earlier one is told apart."""
        self.prompt_len = np.zeros(num_slots, i32)
        self._num_known = np.zeros(num_slots, i32)
        self.prefill_end = np.zeros(num_slots, i32)
        """Tokens to prefill before sampling begins."""
        self._planned = np.zeros(num_slots, i32)
        self.slack = np.zeros(num_slots, i32)
        """By how much `planned` may be too large: steps in flight that verify drafts add one token at least."""
        self.most_drafts = np.zeros(num_slots, i32)
        self.drafted = np.zeros(num_slots, np.int64)
        """Drafted tokens that were verified for the occupant since it joined."""
        self.accepted = np.zeros(num_slots, np.int64)
        """Those of them that became part of its answer."""
        self.last_planned = np.zeros(num_slots, i32)
        self.full_len = np.zeros(num_slots, i32)
        self._last_step = np.zeros(num_slots, np.int64)
        self.admitted = np.zeros(num_slots, np.int64)
        """Rank in the order of admission."""
        self.num_stop_ids = np.zeros(num_slots, i32)
        self.stop_ids = np.full((num_slots, MAX_STOP_IDS + num_eos), -1, i32)
        self.greedy = np.zeros(num_slots, bool)
        self.filtered = np.zeros(num_slots, bool)
        self.adjusts = np.zeros(num_slots, bool)
        """The device changes the slot's logits before it samples."""
        self.logprobs = np.full(num_slots, -1, i32)
        """How many alternatives are reported with each token's logprob; -1: no logprobs."""
        self.holds_end = np.zeros(num_slots, bool)
        self.finish = np.zeros(num_slots, np.uint8)
        """How a HELD slot's answer ended."""
        self.num_new = 0
        """Slots whose occupant has no collected token yet."""
        self.is_new = np.zeros(num_slots, bool)
        self._tokens = virtual_array((num_slots, max_len + 1), i32)
        self._flat_tokens = self._tokens.reshape(-1)
        self._token_base = np.arange(num_slots, dtype=np.int64) * (max_len + 1)
        """_flat_tokens[_token_base[slot] + n] is the slot's n-th token, counted from 0."""
        self._planned_run: PlannedRun | None = None
        self._collected_run: CollectedRun | None = None
        self.occupant: list[Request | None] = [None] * num_slots
        self.version = 0
        """Changes whenever the set of decoding rows does."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._decode = DecodeRows(self)
        self._sampling = SamplingValues(num_slots)
        self._joins: list[int] = []
        self._num_admitted = 0

    # -- lengths and tokens ---------------------------------------------------------------------------------------

    @property
    def planned(self) -> np.ndarray:
        """int32: tokens whose KV is written once all launched steps are done; under speculation at most so many."""
        self._settle_planned()
        return self._planned

    @property
    def least_planned(self) -> np.ndarray:
        """int32: the least that `planned` may turn out to be."""
        return self.planned - self.slack

    @property
    def last_step(self) -> np.ndarray:
        """int64: step that gave the row its last tokens; who waited longest goes first when a step is too small."""
        self._settle_planned()
        return self._last_step

    @property
    def num_known(self) -> np.ndarray:
        """int32: tokens the host knows, prompt and collected output."""
        self._settle_collected()
        return self._num_known

    @property
    def tokens(self) -> np.ndarray:
        """int32 [num_slots, max_len + 1]"""
        self._settle_collected()
        return self._tokens

    def planned_of(self, decode: DecodeRows) -> np.ndarray:
        """int32 [n]: `planned` of the decode rows of now; the caller's own."""
        run = self._planned_run
        return self._planned[decode.index].copy() if run is None else run.lens()

    def plan_steady(self, decode: DecodeRows, step: int) -> np.ndarray:
        """Step `step` gives each of the decode rows of now one more token; int32 [n]: their lengths with it."""
        run = self._planned_run
        if run is None:
            run = self._planned_run = PlannedRun(decode.index, self._planned[decode.index].copy())
        run.num_steps += 1
        run.last_step = step
        return run.lens()

    def collect_steady(self, decode: DecodeRows, tokens: np.ndarray) -> bool:
        """Keep one collected token (int32 [n]) of each of the decode rows of now; False (and nothing kept) where a
        row may end with it or begins, which wants a closer look."""
        run = self._collected_run
        if run is None:
            if self.num_new:
                return False
            index = decode.index
            run = CollectedRun(index, self._num_known[index].copy(), self.full_len[index])
            self._collected_run = run
        if run.num_steps + 1 >= run.num_until_end:
            return False
        if decode.stop_ids.shape[1] and (decode.stop_ids == tokens[:, None]).any():
            return False
        if run.is_full:
            self._settle_collected()
            return self.collect_steady(decode, tokens)
        run.add(tokens)
        return True

    def add_tokens(self, index: np.ndarray | slice, tokens: np.ndarray) -> np.ndarray:
        """One collected token (int32 [n]) for each of the slots at `index`; int32 [n]: what they know now."""
        known = self.num_known[index]
        self._flat_tokens[self._token_base[index] + known] = tokens
        known = known + 1
        self._num_known[index] = known
        return known

    def plan_drafts(self, rows: np.ndarray, num_drafts: int) -> np.ndarray:
        """A step gives each of `rows` one token and up to num_drafts more; int32 [n]: their lengths at most."""
        lens = self.planned[rows] + np.int32(num_drafts + 1)
        self.planned[rows] = lens
        self.slack[rows] += num_drafts
        return lens

    def collect_drafts(self, rows: np.ndarray, num_drafts: int, counts: np.ndarray) -> None:
        """That step has given them so many (int32 [n])."""
        self.planned[rows] -= np.int32(num_drafts + 1) - counts
        self.slack[rows] -= num_drafts

    def add_runs(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Several collected tokens for each of `rows`: int32 [n, m], of which the first counts (int32 [n]) are valid;
        int32 [n]: what they know now."""
        known = self.num_known[rows]
        valid = np.arange(tokens.shape[1]) < counts[:, None]
        places = (self._token_base[rows] + known)[:, None] + np.arange(tokens.shape[1])
        self._flat_tokens[places[valid]] = tokens[valid]
        known = known + counts
        self._num_known[rows] = known
        return known

    def _settle_planned(self) -> None:
        """Write down what the planned steady steps did."""
        run, self._planned_run = self._planned_run, None
        if run is not None:
            self._planned[run.index] = run.lens()
            self._last_step[run.index] = run.last_step

    def _settle_collected(self) -> None:
        """Write down what the collected steady steps brought."""
        run, self._collected_run = self._collected_run, None
        if run is not None and run.num_steps:
            places = self._token_base[run.index] + run.start
            self._flat_tokens[places[:, None] + np.arange(run.num_steps)] = run.tokens()
            self._num_known[run.index] = run.start + np.int32(run.num_steps)

    def _settle(self) -> None:
        self._settle_planned()
        self._settle_collected()

    # -- occupants ------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def decode(self) -> DecodeRows:
        """The decoding slots; the same object as long as `version` stays."""
        if self._decode.version != self.version:
            self._settle()
            self._decode = DecodeRows(self)
        return self._decode

    def used(self) -> np.ndarray:
        """intp: slots with an occupant."""
        return np.flatnonzero(self.state)

    def join(self, request: Request, eos_ids: tuple[int, ...], context_len: int) -> int:
        """Give `request` a free slot, with `context_len` tokens already cached; returns the slot."""
        # The slot is taken last: what goes wrong before that costs only this request.
        slot = self._free[-1]
        sampling = request.sampling
        num_prompt = len(request.prompt_ids)
        num_known = request.num_known
        stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else eos_ids)
        self.request[slot] = request.request
        self.attempt[slot] = request.attempt
        self.prompt_len[slot] = num_prompt
        self.num_known[slot] = num_known
        self.prefill_end[slot] = num_known
        self.planned[slot] = context_len
        # The last token needs no KV, and the step that writes position p samples the token after it.
        self.full_len[slot] = num_prompt + request.max_output
        self.last_planned[slot] = num_prompt + request.max_output - 1
        self.last_step[slot] = 0
        self.slack[slot] = 0
        self.drafted[slot] = self.accepted[slot] = 0
        most = self.max_drafts if sampling.max_drafts is None else min(sampling.max_drafts, self.max_drafts)
        self.most_drafts[slot] = most
        self.admitted[slot] = self._num_admitted
        self._num_admitted += 1
        self.num_stop_ids[slot] = len(stop_ids)
        self.stop_ids[slot] = -1
        if stop_ids:
            self.stop_ids[slot, : len(stop_ids)] = stop_ids
        self.greedy[slot] = sampling.greedy
        self.filtered[slot] = not sampling.greedy and (
            sampling.top_k != -1 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )
        self.adjusts[slot] = sampling.adjusts_logits
        self.logprobs[slot] = sampling.logprobs
        self.holds_end[slot] = bool(sampling.stop)
        self.tokens[slot, :num_prompt] = request.prompt_ids
        self.tokens[slot, num_prompt:num_known] = request.output_ids
        self._sampling.set(slot, sampling)
        self._free.pop()
        self.state[slot] = SlotState.PREFILL
        self.is_new[slot] = True
        self.num_new += 1
        self.occupant[slot] = request
        request.slot = slot
        self._joins.append(slot)
        return slot

    def leave(self, slot: int) -> None:
        """Empty a slot."""
        self._settle()
        request = self.occupant[slot]
        assert request is not None, "slots: leaving a free slot"
        request.slot = -1
        self.occupant[slot] = None
        self.state[slot] = SlotState.FREE
        # Steps in flight that verify drafts for it will not be told of any more.
        self.slack[slot] = 0
        self.epoch[slot] += 1
        self.version += 1
        self.num_new -= int(self.is_new[slot])
        self.is_new[slot] = False
        self._free.append(slot)
        if slot in self._joins:
            self._joins.remove(slot)

    def audit(self) -> list[str]:
        """What no step can put right: lengths in doubt of slots that nobody is in."""
        doubtful = np.flatnonzero((self.state == SlotState.FREE) & (self.slack != 0)).tolist()
        return [f"slots: {slot} is free, but its length is in doubt by {int(self.slack[slot])}" for slot in doubtful]

    def set_state(self, slot: int, state: SlotState) -> None:
        self._settle()
        self.state[slot] = state
        self.version += 1

    def take_joins(self) -> Joins | None:
        """What the device must hear of new occupants; each is told once."""
        if not self._joins:
            return None
        slots, self._joins = self._joins, []
        values = self._sampling
        return Joins(
            slots=np.array(slots, np.int32),
            context_lens=self.planned[slots],
            temperature=values.temperature[slots],
            top_p=values.top_p[slots],
            top_k=values.top_k[slots],
            min_p=values.min_p[slots],
            seeds=values.seeds[slots],
            stop_ids=self.stop_ids[slots, : int(self.num_stop_ids[slots].max())],
            adjustments=tuple(self._adjustment(slot) for slot in slots if self.adjusts[slot]),
            drafting=self._drafting(slots) if self.max_drafts else None,
        )

    def _drafting(self, slots: list[int]) -> Drafting:
        lens = self.num_known[slots]
        texts = [self.tokens[slot, :num] for slot, num in zip(slots, lens.tolist(), strict=True)]
        return Drafting(self.full_len[slots], self.most_drafts[slots], lens, np.concatenate(texts))

    def _adjustment(self, slot: int) -> Adjustment:
        request = self.occupant[slot]
        assert request is not None
        sampling = request.sampling
        none = np.zeros(0, np.int32)
        return Adjustment(
            slot=slot,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            prompt_ids=request.prompt_ids if sampling.has_penalties else none,
            output_ids=request.output_ids if sampling.has_penalties else none,
            bias_ids=np.array([token for token, _ in sampling.logit_bias], np.int32),
            bias_values=np.array([bias for _, bias in sampling.logit_bias], np.float32),
            min_len=len(request.prompt_ids) + sampling.min_tokens,
            end_ids=self.stop_ids[slot, : int(self.num_stop_ids[slot])].copy(),
        )

    def num_output(self, slot: int) -> int:
        """Output tokens collected so far, resumed ones included."""
        return int(self.num_known[slot] - self.prompt_len[slot])

    def output_ids(self, slot: int) -> np.ndarray:
        """int32: the collected output of a slot."""
        return self.tokens[slot, int(self.prompt_len[slot]) : int(self.num_known[slot])].copy()
