"""The step, as data: what the planner asks of a device (StepPlan) and what comes back (StepResult).

Everything is an extend: row i adds q_lens[i] tokens to its context. Rows are indices into slots. Decode rows come
first and take their input token from the device's own slots; the other rows bring tokens from the host.
"""

from __future__ import annotations

import threading
from typing import Protocol

import msgspec
import numpy as np


class Adjustment(msgspec.Struct, frozen=True):
    """How one new occupant's logits are changed before it samples; part of Joins for those that need it."""

    slot: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    prompt_ids: np.ndarray
    """int32: the prompt, if there are penalties, else empty."""
    output_ids: np.ndarray
    """int32: output known so far (a request that goes on), if there are penalties, else empty."""
    bias_ids: np.ndarray
    """int32 [b]"""
    bias_values: np.ndarray
    """float32 [b]"""
    min_len: int
    """Length (prompt and output) below which `end_ids` may not be drawn: a row that samples with kv_len < min_len."""
    end_ids: np.ndarray
    """int32: end-of-sequence and stop tokens."""


class Drafting(msgspec.Struct, frozen=True):
    """What drafters must know of new occupants; arrays [m] in the order of the joins."""

    full_lens: np.ndarray
    """int32: tokens of prompt and answer when the answer is full."""
    most_drafts: np.ndarray
    """int32: drafted tokens of a step at most."""
    text_lens: np.ndarray
    """int32: tokens known, prompt and answer."""
    texts: np.ndarray
    """int32 [sum(text_lens)]: those tokens, one occupant after the other."""


class Joins(msgspec.Struct, frozen=True):
    """Slots that begin a new occupant in this step, with the device's share of its state; all arrays [m]."""

    slots: np.ndarray
    """int32"""
    context_lens: np.ndarray
    """int32: tokens whose KV is already in the slot's pages."""
    temperature: np.ndarray
    """float32"""
    top_p: np.ndarray
    """float32"""
    top_k: np.ndarray
    """int32, -1 = off"""
    min_p: np.ndarray
    """float32"""
    seeds: np.ndarray
    """int64"""
    stop_ids: np.ndarray
    """int32 [m, widest]: tokens that end the slot, -1 where it has fewer."""
    adjustments: tuple[Adjustment, ...] = ()
    """Slots not named here change nothing."""
    drafting: Drafting | None = None
    """None where nobody drafts."""


class PageUpdates(msgspec.Struct, frozen=True):
    """Page-table entries that change before this step: table[slots[i], columns[i]] = pages[i]; int32 [m]."""

    slots: np.ndarray
    columns: np.ndarray
    pages: np.ndarray


class PromptScores(msgspec.Struct, frozen=True):
    """Prompt logprobs wanted of one row of a plan, which is a chunk."""

    row: int
    """Index into the plan's rows."""
    offset: int
    """Token of the row's chunk (from 0) after which the first of `targets` comes."""
    targets: np.ndarray
    """int32 [m]: the tokens that follow the chunk's tokens offset, offset + 1, ..."""
    width: int
    """How many of the most likely tokens to report beside each."""


class StepPlan(msgspec.Struct):
    """One step. Arrays are the plan's own: nobody changes them after launch."""

    step: int
    rows: np.ndarray
    """int32 [n]: slots, decode rows first."""
    num_decode: int
    """Rows [0, num_decode) add one token, the one their slot sampled last."""
    q_lens: np.ndarray
    """int32 [n]: tokens each row adds."""
    kv_lens: np.ndarray
    """int32 [n]: length including this step's tokens; an upper bound where earlier steps verify drafts."""
    tokens: np.ndarray
    """int32 [sum(q_lens[num_decode:])]: host tokens of the other rows, row after row."""
    sample: np.ndarray
    """bool [n]: rows whose last position gives a token; decode rows always do."""
    all_greedy: bool
    needs_filter: bool
    """Some sampling row uses top_k, top_p or min_p."""
    rows_version: int
    """Equal in two plans only if their rows are equal and all decode: a device may keep what it derived."""
    slots_version: int
    """The host slots' version if no row had changed since; -1 where rows must be compared one by one."""
    joins: Joins | None
    pages: tuple[PageUpdates | None, ...]
    """Per cache group."""
    adjusts_logits: bool = False
    """Some sampling row's slot has an Adjustment."""
    logprobs: np.ndarray | None = None
    """int32 [n]: how many of the most likely tokens each row wants beside its own logprob, -1 none; None = no row."""
    prompt_scores: tuple[PromptScores, ...] = ()
    common_lens: np.ndarray | None = None
    """int32 [n], where all rows decode: so many tokens, whole pages, does a row's context have in common with those of
    all other rows that have any; the same number or 0. None = not enough to be worth anything. A hint."""
    num_drafts: int = 0
    """Drafted tokens that each row adds beside its slot's last one; then all rows decode."""


class TokenScores(msgspec.Struct):
    """Logprobs of m tokens: chosen float32 [m], ids int32 [m, width], tops float32 [m, width] best first."""

    chosen: np.ndarray
    ids: np.ndarray
    tops: np.ndarray

    def of(self, rows: np.ndarray) -> TokenScores:
        """Those of some rows, by mask or index."""
        return TokenScores(self.chosen[rows], self.ids[rows], self.tops[rows])

    def part(self, start: int, num: int, width: int) -> TokenScores:
        """Those of `num` tokens from `start` on, with the first `width` of the most likely tokens."""
        part = slice(start, start + num)
        return TokenScores(self.chosen[part], self.ids[part, :width], self.tops[part, :width])


class StepResult(msgspec.Struct):
    """What a step produced, in the order of its plan's rows."""

    tokens: np.ndarray
    """int32 [n, K]; K is 1, with drafts up to 1 + the plan's num_drafts."""
    counts: np.ndarray | None
    """int32 [n]: how many of the row's tokens are valid; None = one where the plan samples, else none. A row's tokens
    end where its slot does: with a stop token, or a full answer."""
    failed: np.ndarray | None
    """bool [n]: rows whose logits held NaN; None = no row."""
    scores: TokenScores | None = None
    """Of all of `tokens`, row after row: [n * K, the widest wish]; anything where none are wanted or no token counts.
    None: of none."""
    prompt_scores: tuple[TokenScores, ...] = ()
    """One for each of the plan's, [m, its width]."""
    drafted: np.ndarray | None = None
    """int32 [n]: drafted tokens of each row that were verified; None = none. All but the first of a row's counts were
    accepted."""


class Handle(msgspec.Struct, eq=False):
    """A launched step. The rest serves devices that work beside the loop."""

    plan: StepPlan
    done: threading.Event | None = None
    result: StepResult | Exception | None = None
    pending: object = None
    """What is on its way to the host."""


class Device(Protocol):
    """Runs plans in launch order. Implementations: cpu, cuda, null, delayed."""

    def launch(self, plan: StepPlan) -> Handle:
        """Start a step; never waits for its results."""
        ...

    def collect(self, handle: Handle) -> StepResult:
        """Wait for the step's results; raises what the step raised."""
        ...

    def pages_freed(self, pages: np.ndarray) -> None:
        """These pages (int32 [m]) belong to nobody now; `delayed` poisons them."""
        ...

    def close(self) -> None:
        """Let go of threads and memory."""
        ...
