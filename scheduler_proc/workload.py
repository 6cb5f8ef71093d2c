"""What the loop drives: text generation. Takes requests in, plans steps, absorbs their results."""

from __future__ import annotations

import logging
import time

import numpy as np

from engine.errors import ContextLengthError, EngineError, InternalError, InvalidRequestError
from engine.ipc.messages import Finish, Started, Stats, StepOutput, TokenizedRequest, unpack_i32, unpack_u64
from scheduler_proc.cache.page_pool import PagePool
from scheduler_proc.outbox import Outbox
from scheduler_proc.plan import StepPlan, StepResult
from scheduler_proc.planner import Planner
from scheduler_proc.request import Request
from scheduler_proc.slots import Slots, SlotState

log = logging.getLogger(__name__)


class GenerateWorkload:
    """All requests of this scheduler, by number, and their way through queue, slots and end."""

    def __init__(
        self,
        slots: Slots,
        pool: PagePool,
        planner: Planner,
        *,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self.slots = slots
        self.pool = pool
        self.planner = planner
        self.outbox = Outbox()
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.max_len = min(context_length, pool.num_pages * pool.page_size)
        """Most tokens of one request."""
        self.requests: dict[int, Request] = {}
        self.audit_errors = 0
        self.num_output_tokens = 0
        """Tokens produced since the start."""
        self._epochs: dict[int, np.ndarray] = {}

    # -- requests -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def accept(self, message: TokenizedRequest) -> None:
        """Queue a request, or refuse it with a typed error."""
        try:
            request = self._checked(message)
        except EngineError as error:
            self.outbox.fail(message.request, message.attempt, message.front, error.info())
            return
        self.requests[request.request] = request
        self.outbox.open(request)
        if len(request.output_ids) >= request.max_output:
            self._drop(request)
            self.outbox.add_row(request, len(request.output_ids), np.zeros(0, np.int32), Finish.LENGTH)
            return
        self.planner.add(request)

    def _checked(self, message: TokenizedRequest) -> Request:
        prompt, output = unpack_i32(message.prompt_ids), unpack_i32(message.output_ids)
        if len(prompt) == 0:
            raise InvalidRequestError("The prompt is empty; at least one token is needed.", param="prompt")
        for name, ids in (("prompt", prompt), ("output_ids", output)):
            if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size):
                raise InvalidRequestError(f"{name} holds a token id outside 0..{self.vocab_size - 1}.", param=name)
        room = self.max_len - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens; {self._limit()}. Send a shorter prompt.", param="messages"
            )
        wanted = message.sampling.max_tokens
        if wanted is not None and wanted > room:
            raise ContextLengthError(
                f"The prompt has {len(prompt)} tokens and max_tokens is {wanted}, together {len(prompt) + wanted}; "
                f"{self._limit()}. Lower max_tokens to {room} or leave it out.",
                param="max_tokens",
            )
        if message.request in self.requests:
            raise InternalError(f"request {message.request} is here already")
        message.stamps.queued = time.monotonic_ns()
        return Request(
            request=message.request,
            attempt=message.attempt,
            front=message.front,
            label=message.label,
            prompt_ids=prompt,
            output_ids=output,
            sampling=message.sampling,
            stream=message.stream,
            max_output=room if wanted is None else wanted,
            stamps=message.stamps,
        )

    def _limit(self) -> str:
        """What bounds a request, for people."""
        if self.max_len < self.context_length:
            return (
                f"prompt and answer together may have {self.max_len} tokens, the size of this server's KV pool "
                f"(--max-total-tokens), though the model's context length is {self.context_length}"
            )
        return f"prompt and answer together may have {self.max_len} tokens, the context length"

    def abort(self, number: int, attempt: int) -> None:
        """End a request wherever it is; unknown ones have ended already."""
        request = self._known(number, attempt)
        if request is None:
            return
        num_tokens = self._num_output(request)
        self._drop(request)
        self.outbox.add_row(request, num_tokens, np.zeros(0, np.int32), Finish.ABORT)

    def stop(self, number: int, attempt: int, num_tokens: int) -> None:
        """The detokenizer found the end of the text after `num_tokens` tokens, or confirms a held-back end."""
        request = self._known(number, attempt)
        if request is not None:
            self._drop(request)

    def resend(self, number: int, attempt: int, first_token: int) -> None:
        """Say again what a request produced from output index `first_token` on."""
        request = self._known(number, attempt)
        if request is None:
            log.error("event=resend_of_ended request=%d first_token=%d", number, first_token)
            error = InternalError("A part of this request's output was lost.")
            self.outbox.fail(number, attempt, -1, error.info())
            return
        output = self.slots.output_ids(request.slot) if request.slot >= 0 else request.output_ids
        self.outbox.add_row(request, first_token, output[first_token:])

    def fail(self, request: Request, error: EngineError) -> None:
        """End one request with an error."""
        self._drop(request)
        self.outbox.fail(request.request, request.attempt, request.front, error.info())

    def _known(self, number: int, attempt: int) -> Request | None:
        request = self.requests.get(number)
        return request if request is not None and request.attempt == attempt else None

    def _drop(self, request: Request) -> None:
        del self.requests[request.request]
        if request.slot >= 0:
            self.planner.release(request.slot)
        elif request in self.planner.waiting:
            self.planner.remove_waiting(request)

    def _num_output(self, request: Request) -> int:
        return int(self.slots.num_output[request.slot]) if request.slot >= 0 else len(request.output_ids)

    # -- steps ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Admit what fits and plan the next step; None if nothing can move now."""
        planner = self.planner
        try:
            if planner.waiting:
                planner.admit(time.monotonic_ns())
            return planner.plan()
        except Exception as error:
            self._plan_failed(error)
            return None

    def _plan_failed(self, error: Exception) -> None:
        """An exception while one request was admitted is its own; elsewhere it is the running batch's."""
        culprit, self.planner.admitting = self.planner.admitting, None
        running = [request for request in self.slots.occupant if request is not None]
        victims = running if culprit is None else [culprit]
        self._fail_all(victims, "planning", error)

    def launched(self, plan: StepPlan) -> None:
        """The device has taken the plan."""
        self._epochs[plan.step] = self.slots.epoch[plan.rows]
        self.planner.newest_in_flight = plan.step

    def launch_failed(self, plan: StepPlan, error: Exception) -> None:
        """The device refused the plan: everything it told of is lost, so all it names fail."""
        slots = [plan.rows]
        if plan.joins is not None:
            slots.append(plan.joins.slots)
        if plan.pages is not None:
            slots.append(plan.pages.slots)
        self._fail_all(self._occupants(np.unique(np.concatenate(slots))), "launch", error)

    def collected(self, plan: StepPlan, result: StepResult | Exception) -> None:
        """A step is done: take in its tokens, or fail its requests."""
        epochs = self._epochs.pop(plan.step)
        same = self.slots.epoch[plan.rows] == epochs
        if plan.step == self.planner.newest_in_flight:
            self.planner.newest_in_flight = None
        if isinstance(result, Exception):
            self._fail_all(self._occupants(plan.rows[same]), "step", result)
        else:
            try:
                self._absorb(plan, result, same)
            except Exception as error:
                # Whoever ended before the exception is gone from the slots already.
                same &= self.slots.epoch[plan.rows] == epochs
                self._fail_all(self._occupants(plan.rows[same]), "result", error)
        self.pool.step_done(plan.step)

    def send_failed(self, output: StepOutput, error: Exception) -> None:
        """A message could not be sent: whoever is in it ends with an error, which the next message carries."""
        numbers = {int(number) for number in unpack_u64(output.tokens.requests)}
        numbers.update(opened.request for opened in output.opened)
        self.outbox.failed.extend(output.failed)
        self._fail_all([self.requests[number] for number in sorted(numbers) if number in self.requests], "send", error)
        # Those that ended within the lost message are told by their number; the detokenizer knows their front.
        fronts = {opened.request: opened.front for opened in output.opened}
        told = {failed.request for failed in self.outbox.failed}
        attempts = dict(
            zip(unpack_u64(output.tokens.requests).tolist(), unpack_i32(output.tokens.attempts).tolist(), strict=True)
        )
        for number in sorted(numbers - told):
            info = InternalError("An internal error ended this request (send).").info()
            self.outbox.fail(number, attempts.get(number, 0), fronts.get(number, -1), info)

    def _occupants(self, slots: np.ndarray) -> list[Request]:
        occupants = (self.slots.occupant[slot] for slot in slots.tolist())
        return [request for request in occupants if request is not None]

    def _absorb(self, plan: StepPlan, result: StepResult, same: np.ndarray) -> None:
        if result.failed is not None:
            self._fail_rows(plan, result.failed & same)
            same = same & ~result.failed
        slots = self.slots
        took = (result.counts > 0) & same & (slots.state[plan.rows] == SlotState.DECODE)
        rows = plan.rows[took]
        if len(rows) == 0:
            return
        tokens = result.tokens[took, 0]
        first = slots.num_output[rows]
        slots.tokens[rows, slots.num_known[rows]] = tokens
        slots.num_known[rows] += 1
        slots.num_output[rows] = first + 1
        stopped = (slots.stop_ids[rows] == tokens[:, None]).any(axis=1)
        finish = np.where(stopped, np.uint8(Finish.STOP_TOKEN), np.uint8(Finish.NONE))
        finish[(first + 1 >= slots.max_output[rows]) & ~stopped] = Finish.LENGTH
        held = slots.holds_end[rows] & (finish != Finish.NONE)
        self.num_output_tokens += len(rows)
        if slots.is_new[rows].any():
            self._report_start(rows[slots.is_new[rows]])
        self.outbox.add_tokens(
            slots.request[rows],
            slots.attempt[rows],
            first,
            np.ones(len(rows), np.int32),
            tokens,
            finish,
            held.astype(np.uint8),
        )
        if finish.any():
            self._end(rows[finish != Finish.NONE], held[finish != Finish.NONE])

    def _end(self, rows: np.ndarray, held: np.ndarray) -> None:
        for slot, holds in zip(rows.tolist(), held.tolist(), strict=True):
            request = self.slots.occupant[slot]
            assert request is not None
            if holds:
                self.slots.set_state(slot, SlotState.HELD)
            else:
                self._drop(request)

    def _report_start(self, rows: np.ndarray) -> None:
        now = time.monotonic_ns()
        self.slots.is_new[rows] = False
        for slot in rows.tolist():
            request = self.slots.occupant[slot]
            assert request is not None
            if not request.started:
                request.started = True
                request.stamps.first_token = now
                self.outbox.started.append(Started(request.request, request.attempt, 0, request.stamps))

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

    # -- looking in -----------------------------------------------------------------------------------------------

    def audit(self) -> list[str]:
        """Every page's owners rebuilt; empty = each page has exactly one. Counts what it finds."""
        problems = self.pool.audit(self.slots.tails())
        if problems:
            self.audit_errors += len(problems)
            log.error("event=audit problems=%d first=%s", len(problems), "; ".join(problems[:8]))
        return problems

    def stats(self, call: int) -> Stats:
        """A snapshot for /server_info."""
        pool = self.pool
        tail = pool.num_pages - pool.num_free - pool.num_in_flight
        return Stats(
            call=call,
            running=self.slots.num_used,
            waiting=len(self.planner.waiting),
            step=self.planner.step,
            pages_total=pool.num_pages,
            pages_free=pool.num_free,
            pages_tree=0,
            pages_tail=tail,
            pages_in_flight=pool.num_in_flight,
            audit_errors=self.audit_errors,
        )
