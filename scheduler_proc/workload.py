"""What the loop drives: text generation. Takes requests in, plans steps, absorbs their results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from engine.errors import EngineError, InternalError, InvalidRequestError, OverloadedError
from engine.ipc.messages import (
    Finish,
    FlushCall,
    Logprobs,
    PinTokens,
    Reply,
    Started,
    Stats,
    StepOutput,
    TokenizedRequest,
    UnpinCall,
    unpack_i32,
)
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.intake import Intake
from scheduler_proc.logprobs import joined, packed, since
from scheduler_proc.outbox import Outbox, SteadyRows
from scheduler_proc.plan import PromptScores, StepPlan, StepResult, TokenScores
from scheduler_proc.planner import Planner
from scheduler_proc.rate import Rate
from scheduler_proc.request import Request
from scheduler_proc.slots import Slots, SlotState

log = logging.getLogger(__name__)

_NO_LOGPROB = np.array([np.nan], np.float32).tobytes()


class GenerateWorkload:
    """All requests of this scheduler, by number, and their way through queue, slots and end."""

    def __init__(
        self,
        slots: Slots,
        cache: KvCache,
        planner: Planner,
        *,
        vocab_size: int,
        context_length: int,
        max_queued: int | None = None,
        weights_version: str = "default",
        end_turn: Sequence[Callable[[], object]] = (),
        settled: dict[str, str | int] | None = None,
    ) -> None:
        """settled: what stats tell of options."""
        self._settled = settled or {}
        self.slots = slots
        self.cache = cache
        self.planner = planner
        self.outbox = Outbox()
        self.intake = Intake(vocab_size, context_length, cache.max_tokens, cache.page_size, weights_version)
        self.max_queued = max_queued
        self.requests: dict[int, Request] = {}
        self.audit_errors = 0
        self.num_output_tokens = 0
        """Tokens produced since the start."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_drafted = 0
        """Drafted tokens that were verified since the start."""
        self.num_accepted = 0
        self.num_verified = 0
        """Rows of steps that verified drafts; each gave one token beside the accepted ones."""
        self.ended = Rate()
        """How fast requests leave, for Retry-After."""
        self._end_turn: list[Callable[[], object]] = list(end_turn)
        if cache.tree is not None:
            self._end_turn.append(cache.tree.expire_pins)
        self._epochs: dict[int, tuple[int, np.ndarray]] = {}
        self._told: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        """Slots of which a launched step tells the device something new, and their epochs."""
        self._steady: SteadyRows | None = None

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def accept(self, message: TokenizedRequest) -> None:
        """Queue a request, or refuse it with a typed error."""
        try:
            request = self.intake.request(message)
            self._check_queue()
        except EngineError as error:
            self.outbox.fail(message.request, message.attempt, message.front, error.info())
            return
        self.requests[request.request] = request
        self.outbox.open(request)
        if request.score_from == 0:
            # Nothing comes before the first token, so it has no logprob.
            self.outbox.add_prompt(request, 0, request.prompt_ids[:1], Logprobs(0, _NO_LOGPROB, b"", b""))
            request.score_from = 1
        if len(request.output_ids) >= request.max_output > 0:
            self._drop(request)
            self.outbox.add_row(request, len(request.output_ids), np.zeros(0, np.int32), Finish.LENGTH)
            return
        self.planner.admission.add(request)

    def _check_queue(self) -> None:
        """Raise OverloadedError when as many wait as may."""
        if self.max_queued is None or self.planner.admission.num_queued < self.max_queued:
            return
        num_waiting = self.planner.admission.num_queued
        wait_s = self.ended.seconds_for(num_waiting + 1)
        raise OverloadedError(
            f"The queue is full: {num_waiting} requests wait (--max-queued-requests {self.max_queued}). "
            f"Try again in about {wait_s} s.",
            retry_after_s=wait_s,
        )

    def abort(self, number: int, attempt: int) -> None:
        """End a request wherever it is; unknown ones have ended already."""
        request = self._known(number, attempt)
        if request is None:
            return
        num_tokens = self._num_output(request)
        self._tell_drafted(request)
        self._drop(request)
        self.outbox.add_row(request, num_tokens, np.zeros(0, np.int32), Finish.ABORT)

    def stop(self, number: int, attempt: int, num_tokens: int) -> None:
        """The detokenizer found the end of the text after `num_tokens` tokens, or confirms a held-back end."""
        request = self._known(number, attempt)
        if request is not None:
            self._finish(request, num_tokens)

    def resend(self, number: int, attempt: int, first_token: int) -> None:
        """Say again what a request produced from output index `first_token` on."""
        request = self._known(number, attempt)
        if request is None:
            log.error("event=resend_of_ended request=%d first_token=%d", number, first_token)
            error = InternalError("A part of this request's output was lost.")
            self.outbox.fail(number, attempt, -1, error.info())
            return
        output = self.slots.output_ids(request.slot) if request.slot >= 0 else request.output_ids
        held = request.slot >= 0 and self.slots.state[request.slot] == SlotState.HELD
        finish = Finish(int(self.slots.finish[request.slot])) if held else Finish.NONE
        known = None
        if request.logprobs and first_token < len(output):
            known = since(joined(request.logprobs), first_token - request.num_known_at_first)
        self._tell_drafted(request)
        self.outbox.add_row(request, first_token, output[first_token:], finish, held=held, logprobs=known)

    def fail(self, request: Request, error: EngineError) -> None:
        """End one request with an error; nothing of it is shared any more."""
        self._drop(request, broken=True)
        self.outbox.fail(request.request, request.attempt, request.front, error.info())

    def _known(self, number: int, attempt: int) -> Request | None:
        request = self.requests.get(number)
        return request if request is not None and request.attempt == attempt else None

    def _drop(
        self, request: Request, num_tokens: int = 0, keys: np.ndarray | None = None, *, broken: bool = False
    ) -> None:
        """Forget a request; with `keys` the first `num_tokens` tokens of its slot stay in the prefix cache."""
        self.requests.pop(request.request, None)
        if request.slot >= 0:
            self.planner.release(request.slot, request, num_tokens, keys, broken=broken)
        else:
            self.planner.admission.remove(request)

    def _finish(self, request: Request, num_output: int | None = None) -> None:
        """A request has ended well, after `num_output` tokens of its output (None: all): cache what it computed."""
        self.ended.count()
        slot = request.slot
        if slot < 0:
            self._drop(request)
            return
        slots = self.slots
        # The last token has no KV, and what comes after a stop string is not cached.
        computed = int(slots.num_known[slot]) - 1
        if num_output is not None:
            computed = min(computed, int(slots.prompt_len[slot]) + num_output)
        if request.max_output:
            self.planner.admission.estimate.finished(request.max_output, slots.num_output(slot))
        collected = not slots.is_new[slot]
        self._drop(request, computed, slots.tokens[slot, :computed].astype(np.int64) if collected else None)

    def _num_output(self, request: Request) -> int:
        return self.slots.num_output(request.slot) if request.slot >= 0 else len(request.output_ids)

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Admit what fits and plan the next step; None if nothing can move now."""
        planner = self.planner
        try:
            if planner.budget is not None:
                planner.budget.begin_turn()
            if planner.admission.waiting:
                planner.admission.admit(time.monotonic_ns())
            return planner.plan()
        except Exception as error:
            self._plan_failed(error)
            return None

    def _plan_failed(self, error: Exception) -> None:
        """An exception while one request was admitted is its own; elsewhere it is the running batch's."""
        culprit, self.planner.admission.admitting = self.planner.admission.admitting, None
        running = [request for request in self.slots.occupant if request is not None]
        victims = running if culprit is None else [culprit]
        self._fail_all(victims, "planning", error)

    def launched(self, plan: StepPlan) -> None:
        """The device has taken the plan."""
        steady = plan.slots_version == self.slots.version
        epochs = self.slots.decode().epochs if steady else self.slots.epoch[plan.rows]
        self._epochs[plan.step] = (plan.slots_version, epochs)
        told = _told(plan)
        if told is not None:
            self._told[plan.step] = (told, self.slots.epoch[told])
        self.cache.launched(plan.step)

    def launch_failed(self, plan: StepPlan, error: Exception) -> None:
        """The device refused the plan: everything it told of is lost, so all it names fail."""
        told = _told(plan)
        slots = plan.rows if told is None else np.union1d(plan.rows, told)
        self._fail_all(self._occupants(slots), "launch", error)

    def collected(self, plan: StepPlan, result: StepResult | Exception) -> None:
        """A step is done: take in its tokens, or fail its requests."""
        version, epochs = self._epochs.pop(plan.step)
        self._tell_budget(plan, result)
        told = self._told.pop(plan.step, None)
        # Before anything is given back: what this step used is free of it now.
        self.cache.collected(plan.step)
        try:
            if isinstance(result, Exception):
                raise result
            plain = result.failed is None and result.counts is None and result.scores is None
            if plain and version == self.slots.version:
                self._absorb_steady(result)
            else:
                self._absorb(plan, result, self.slots.epoch[plan.rows] == epochs)
        except Exception as error:
            # Whoever ended before the exception is gone from the slots already.
            slots = [plan.rows[self.slots.epoch[plan.rows] == epochs]]
            if told is not None and isinstance(result, Exception):
                # Whether the device has heard of these is not known.
                slots.append(told[0][self.slots.epoch[told[0]] == told[1]])
            self._fail_all(self._occupants(np.unique(np.concatenate(slots))), "step", error)

    def _tell_budget(self, plan: StepPlan, result: StepResult | Exception) -> None:
        budget = self.planner.budget
        if budget is None:
            return
        if isinstance(result, Exception) or plan.num_decode < len(plan.rows):
            budget.forget_turn()
        else:
            budget.collected(len(plan.rows), plan.num_drafts, result.counts, result.drafted)

    def send_failed(self, output: StepOutput, error: Exception) -> None:
        """A message could not be sent: whoever is in it ends with an error, which the next message carries."""
        requests, attempts_of = self.outbox.named_in(output)
        numbers = set(requests)
        numbers.update(opened.request for opened in output.opened)
        numbers.update(prompt.request for prompt in output.prompts)
        self.outbox.failed.extend(output.failed)
        self._fail_all([self.requests[number] for number in sorted(numbers) if number in self.requests], "send", error)
        # Those that ended within the lost message are told by their number; the detokenizer knows their front.
        fronts = {opened.request: opened.front for opened in output.opened}
        told = {failed.request for failed in self.outbox.failed}
        attempts = dict(zip(requests, attempts_of, strict=True))
        for number in sorted(numbers - told):
            info = InternalError("An internal error ended this request (send).").info()
            self.outbox.fail(number, attempts.get(number, 0), fronts.get(number, -1), info)

    def _occupants(self, slots: np.ndarray) -> list[Request]:
        occupants = (self.slots.occupant[slot] for slot in slots.tolist())
        return [request for request in occupants if request is not None]

    def _absorb_steady(self, result: StepResult) -> None:
        """Nobody came or went since the step was planned: all its rows decode, and the receiver knows them."""
        decode = self.slots.decode()
        tokens = result.tokens[:, 0]
        if not self.slots.collect_steady(decode, tokens):
            self._take_tokens(decode.rows, decode.index, tokens)
            return
        self.num_output_tokens += len(tokens)
        steady = self._steady
        if steady is None or steady.of is not decode:
            known = self.slots.num_known[decode.index]
            first = known - self.slots.prompt_len[decode.index] - 1
            steady = self._steady = SteadyRows(decode, decode.requests, decode.attempts, first)
        self.outbox.add_steady(steady, tokens)

    def _absorb(self, plan: StepPlan, result: StepResult, same: np.ndarray) -> None:
        if plan.num_drafts:
            assert result.counts is not None
            self.slots.collect_drafts(plan.rows[same], plan.num_drafts, result.counts[same])
        if result.failed is not None:
            self._fail_rows(plan, result.failed & same)
            same = same & ~result.failed
        self._commit_chunks(plan, same)
        for wanted, scores in zip(plan.prompt_scores, result.prompt_scores, strict=True):
            if same[wanted.row]:
                self._report_prompt(plan, wanted, scores)
        slots = self.slots
        sampled = plan.sample if result.counts is None else result.counts > 0
        took = sampled & same & (slots.state[plan.rows] == SlotState.DECODE)
        wants_none = took & (slots.full_len[plan.rows] == slots.prompt_len[plan.rows])
        if wants_none.any():
            took &= ~wants_none
            self._end_without_tokens(plan.rows[wants_none])
        rows = plan.rows[took]
        if len(rows):
            scores = None if result.scores is None else result.scores.of(np.repeat(took, result.tokens.shape[1]))
            if result.counts is None:
                self._take_tokens(rows, rows, result.tokens[took, 0], scores)
            else:
                assert result.drafted is not None
                self._take_runs(rows, result.tokens[took], result.counts[took], result.drafted[took], scores)

    def _report_prompt(self, plan: StepPlan, wanted: PromptScores, scores: TokenScores) -> None:
        request = self.slots.occupant[int(plan.rows[wanted.row])]
        assert request is not None
        first = int(plan.kv_lens[wanted.row] - plan.q_lens[wanted.row]) + wanted.offset + 1
        self.outbox.add_prompt(request, first, wanted.targets, packed(scores))
        request.score_from = first + len(wanted.targets)

    def _end_without_tokens(self, rows: np.ndarray) -> None:
        """Prompts that wanted no answer are done."""
        self._report_start(rows[self.slots.is_new[rows]])
        for slot in rows.tolist():
            request = self.slots.occupant[slot]
            assert request is not None
            self.outbox.add_row(request, 0, np.zeros(0, np.int32), Finish.LENGTH)
            self._finish(request)

    def _commit_chunks(self, plan: StepPlan, same: np.ndarray) -> None:
        """Prompt chunks that this step has computed may be shared from now on."""
        for index in range(plan.num_decode, len(plan.rows)):
            if same[index]:
                slot = int(plan.rows[index])
                request = self.slots.occupant[slot]
                assert request is not None
                self.cache.commit(slot, request, int(plan.kv_lens[index]))

    def _take_tokens(
        self, rows: np.ndarray, index: np.ndarray | slice, tokens: np.ndarray, scores: TokenScores | None = None
    ) -> None:
        """One new token for each of `rows` (`index` says the same, faster): keep it, report it, see who has ended."""
        slots = self.slots
        self._steady = None
        now_known = slots.add_tokens(index, tokens)
        self.num_output_tokens += len(rows)
        ends = now_known >= slots.full_len[index]
        stopped = None
        width = int(slots.num_stop_ids[index].max())
        if width:
            stopped = (slots.stop_ids[index, :width] == tokens[:, None]).any(axis=1)
            ends = ends | stopped
        if slots.num_new:
            self._report_start(rows[slots.is_new[index]])
        first = now_known - 1 - slots.prompt_len[index]
        ones = np.ones(len(rows), np.int32)
        finish = np.where(ends, np.uint8(Finish.LENGTH), np.uint8(Finish.NONE))
        if stopped is not None:
            finish[stopped] = Finish.STOP_TOKEN
        held = slots.holds_end[index] & ends
        self.outbox.add_tokens(
            slots.request[index].copy(),
            slots.attempt[index].copy(),
            first,
            ones,
            tokens,
            finish,
            held.astype(np.uint8),
            [] if scores is None else self._keep_logprobs(rows, ones, scores),
        )
        if ends.any():
            self._end(rows[ends], held[ends], finish[ends])

    def _take_runs(
        self,
        rows: np.ndarray,
        tokens: np.ndarray,
        counts: np.ndarray,
        drafted: np.ndarray,
        scores: TokenScores | None,
    ) -> None:
        """One new token or more for each of `rows`: int32 [n, m], of which the first counts (int32 [n]) are valid;
        drafted: int32 [n], how many tokens were drafted for them."""
        slots = self.slots
        self._steady = None
        counts = np.minimum(counts, slots.full_len[rows] - slots.num_known[rows])
        ends_at = _first_ends(slots.stop_ids[rows, : int(slots.num_stop_ids[rows].max())], tokens)
        stopped = ends_at <= counts
        counts = np.minimum(counts, ends_at).astype(np.int32)
        now_known = slots.add_runs(rows, tokens, counts)
        self.num_output_tokens += int(counts.sum())
        slots.drafted[rows] += drafted
        slots.accepted[rows] += counts - 1
        self.num_drafted += int(drafted.sum())
        self.num_accepted += int(counts.sum()) - len(rows)
        self.num_verified += len(rows)
        ends = stopped | (now_known >= slots.full_len[rows])
        if slots.num_new:
            self._report_start(rows[slots.is_new[rows]])
        finish = np.where(ends, np.uint8(Finish.LENGTH), np.uint8(Finish.NONE))
        finish[stopped] = Finish.STOP_TOKEN
        held = slots.holds_end[rows] & ends
        self.outbox.add_tokens(
            slots.request[rows].copy(),
            slots.attempt[rows].copy(),
            now_known - counts - slots.prompt_len[rows],
            counts,
            tokens[np.arange(tokens.shape[1]) < counts[:, None]],
            finish,
            held.astype(np.uint8),
            [] if scores is None else self._keep_logprobs(rows, counts, scores),
        )
        # The detokenizer may find that the text has ended.
        for slot in rows[slots.holds_end[rows] & ~ends].tolist():
            request = slots.occupant[slot]
            assert request is not None
            self._tell_drafted(request)
        if ends.any():
            self._end(rows[ends], held[ends], finish[ends])

    def _tell_drafted(self, request: Request) -> None:
        """How many tokens were drafted for a request, if any were."""
        drafted, accepted = request.num_drafted, request.num_accepted
        if request.slot >= 0:
            drafted += int(self.slots.drafted[request.slot])
            accepted += int(self.slots.accepted[request.slot])
        if drafted:
            self.outbox.add_drafted(request, accepted, drafted - accepted)

    def _keep_logprobs(self, rows: np.ndarray, counts: np.ndarray, scores: TokenScores) -> list[tuple[int, Logprobs]]:
        """Logprobs of the rows that want them, by index: of the first counts (int32 [n]) of each row's tokens, of which
        the scores have equally many for all rows."""
        found = []
        widths = self.slots.logprobs[rows].tolist()
        size = len(scores.chosen) // len(rows)
        for index, (slot, num, width) in enumerate(zip(rows.tolist(), counts.tolist(), widths, strict=True)):
            request = self.slots.occupant[slot]
            if width >= 0 and request is not None:
                one = packed(scores.part(index * size, num, width))
                request.logprobs.append(one)
                found.append((index, one))
        return found

    def _end(self, rows: np.ndarray, held: np.ndarray, finish: np.ndarray) -> None:
        self.slots.finish[rows] = finish
        for slot, holds in zip(rows.tolist(), held.tolist(), strict=True):
            request = self.slots.occupant[slot]
            assert request is not None
            self._tell_drafted(request)
            if holds:
                self.slots.set_state(slot, SlotState.HELD)
            else:
                self._finish(request)

    def _report_start(self, rows: np.ndarray) -> None:
        now = time.monotonic_ns()
        self.slots.is_new[rows] = False
        self.slots.num_new -= len(rows)
        for slot in rows.tolist():
            request = self.slots.occupant[slot]
            assert request is not None
            if not request.started:
                request.started = True
                request.stamps.first_token = now
                self.num_prompt_tokens += len(request.prompt_ids)
                self.num_cached_tokens += request.cached_tokens
                self.outbox.started.append(
                    Started(request.request, request.attempt, request.cached_tokens, request.stamps)
                )

    def _fail_rows(self, plan: StepPlan, failed: np.ndarray) -> None:
        for slot in plan.rows[failed].tolist():
            request = self.slots.occupant[slot]
            assert request is not None
            log.error("event=nan_logits request=%d label=%r step=%d", request.request, request.label, plan.step)
            self.fail(request, InternalError("The model's output was not a number; this request ended.", code="nan"))

    def _fail_all(self, requests: list[Request], where: str, error: Exception) -> None:
        numbers = [request.request for request in requests]
        log.error("event=step_failed where=%s requests=%s", where, numbers, exc_info=error)
        for request in requests:
            self.fail(request, InternalError(f"An internal error ended this request ({where})."))

    def end_turn(self) -> None:
        """What is due once a turn, whatever happened in it: pins run out, events go out."""
        if self.planner.budget is not None and not self.requests:
            self.planner.budget.forget_turn()
        for due in self._end_turn:
            due()

    # -- looking in -----------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Every page's owners rebuilt; empty = each page has exactly one. Counts what it finds."""
        problems = self.cache.audit(self.slots.used()) + self.planner.admission.audit(self.requests)
        problems += self.slots.audit()
        if problems:
            self.audit_errors += len(problems)
            log.error("event=audit problems=%d first=%s", len(problems), "; ".join(problems[:8]))
        return problems

    def audit_idle(self) -> None:
        """The audit of a scheduler without work: what it finds is logged, counted, and put right."""
        if self.audit() and not self.slots.num_used:
            self.cache.reclaim()

    def answer(self, message: FlushCall | PinTokens | UnpinCall) -> Reply:
        """Carry out a call on the prefix cache."""
        try:
            return Reply(message.call, self._carry_out(message))
        except EngineError as error:
            return Reply(message.call, {}, error.info())

    def _carry_out(self, message: FlushCall | PinTokens | UnpinCall) -> dict[str, int]:
        tree = self.cache.tree
        if tree is None:
            raise InvalidRequestError("The prefix cache is off (--disable-radix-cache).")
        if isinstance(message, FlushCall):
            return {"pages": tree.flush()}
        if isinstance(message, UnpinCall):
            return {"found": int(tree.unpin(message.pin))}
        keys = unpack_i32(message.ids).astype(np.int64)
        pin, num_tokens = tree.pin(self.intake.namespace(message.cache_salt), keys, message.ttl_s)
        if num_tokens == 0:
            raise InvalidRequestError(
                "Nothing of this prefix is cached: send it once as a request, then pin it.", code="not_cached"
            )
        return {"pin": pin, "tokens": num_tokens}

    def stats(self, call: int) -> Stats:
        """A snapshot for /server_info; pages of the first cache group."""
        pool, tree = self.cache.pools[0], self.cache.tree
        in_tree = 0 if tree is None else tree.num_pages(0)
        return Stats(
            call=call,
            running=self.slots.num_used,
            waiting=len(self.planner.admission.waiting),
            step=self.planner.step,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_tree=in_tree,
            pages_tail=pool.num_pages - pool.num_free - pool.num_in_flight - in_tree,
            pages_in_flight=pool.num_in_flight,
            audit_errors=self.audit_errors,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.num_cached_tokens,
            output_tokens=self.num_output_tokens,
            retractions=self.planner.num_retractions,
            drafted_tokens=self.num_drafted,
            accepted_tokens=self.num_accepted,
            verified_rows=self.num_verified,
            settled=self._settled,
        )


def _told(plan: StepPlan) -> np.ndarray | None:
    """Slots of which a plan tells the device something new; None = none, the usual case."""
    slots = [] if plan.joins is None else [plan.joins.slots]
    slots += [updates.slots for updates in plan.pages if updates is not None]
    return np.concatenate(slots) if slots else None


def _first_ends(stop_ids: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """int64 [n]: how many tokens of each row there are up to the first of its stop_ids; more than all without one.

    stop_ids: int32 [n, widest], -1 where a row has fewer; tokens: int32 [n, m], none below 0.
    """
    found = (tokens[:, :, None] == stop_ids[:, None, :]).any(axis=2)
    return np.where(found.any(axis=1), found.argmax(axis=1) + 1, tokens.shape[1] + 1)
