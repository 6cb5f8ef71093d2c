"""All open requests of the detokenizer: takes step outputs in, gives front outputs and stops out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from detokenizer_proc.logprobs import token_logprobs
from detokenizer_proc.text import TextStream
from engine.errors import InternalError
from engine.ipc.messages import (
    Accepted,
    Drafted,
    Ended,
    Failed,
    Finish,
    FrontOutput,
    Logprobs,
    Opened,
    PromptDelta,
    PromptLogprobs,
    Resend,
    RowReader,
    Stamps,
    StepOutput,
    Stop,
    TextDelta,
    TokenBatch,
    TokenLogprob,
    pack_i32,
    unpack_i32,
)

log = logging.getLogger(__name__)

KEPT_DELTAS = 256
"""Deltas kept of a request: a front misses one when the next comes, so it asks for the last few."""
UNSTREAMED_EVERY = 64
"""Tokens between two deltas of a request nobody streams."""


class _Open(msgspec.Struct, eq=False):
    """One request's state."""

    opened: Opened
    text: TextStream
    num_tokens: int
    """Output tokens seen, resumed ones included."""
    unsent: list[int]
    unsent_logprobs: list[TokenLogprob]
    every: int
    cached_tokens: int
    stamps: Stamps
    sent: deque[TextDelta]
    """What the front was given last, for a resend."""
    accepted_drafts: int = 0
    rejected_drafts: int = 0


class Streams:
    """Open requests by number. Outputs gather per front until `take`."""

    def __init__(self, table: Sequence[bytes], special_ids: frozenset[int], num_fronts: int) -> None:
        self._table = table
        self._special_ids = special_ids
        self._open: dict[int, _Open] = {}
        self._reader = RowReader()
        self._outputs = [FrontOutput(0, [], [], [], []) for _ in range(num_fronts)]
        self._to_scheduler: list[Stop | Resend] = []
        self.step = 0

    def __len__(self) -> int:
        return len(self._open)

    def take(self) -> tuple[list[tuple[int, FrontOutput]], list[Stop | Resend]]:
        """(front, message) pairs that have something to say, and messages to the scheduler; both start anew."""
        ready = []
        for front, output in enumerate(self._outputs):
            if output.accepted or output.deltas or output.ended or output.failed or output.prompts:
                output.step = self.step
                ready.append((front, output))
                self._outputs[front] = FrontOutput(0, [], [], [], [])
        stops, self._to_scheduler = self._to_scheduler, []
        return ready, stops

    def absorb(self, output: StepOutput) -> None:
        """Take in one step."""
        self.step = output.step
        for opened in output.opened:
            self._begin(opened)
        for started in output.started:
            if (state := self._open.get(started.request)) is not None:
                state.cached_tokens = started.cached_tokens
                state.stamps = started.stamps
        for prompt in output.prompts:
            self._absorb_prompt(prompt)
        for drafted in output.drafted:
            self._absorb_drafted(drafted)
        self._absorb_tokens(output.tokens)
        for failed in output.failed:
            self._fail(failed)

    def resend(self, message: Resend) -> None:
        """A front lacks deltas from output index `first_token` on: give them again."""
        state = self._open.get(message.request)
        if state is None or state.opened.attempt != message.attempt:
            return
        if not state.sent or state.sent[0].first_token > message.first_token:
            error = InternalError("A part of this request's output was lost.").info()
            self._fail(Failed(message.request, message.attempt, state.opened.front, error))
            return
        deltas = self._outputs[state.opened.front].deltas
        deltas.extend(delta for delta in state.sent if delta.first_token >= message.first_token)

    def _begin(self, opened: Opened) -> None:
        skipped = self._special_ids if opened.skip_special_tokens else frozenset()
        text = TextStream(self._table, skipped, opened.stop, min_tokens=opened.min_tokens, keep_stop=opened.keep_stop)
        known = unpack_i32(opened.output_ids).tolist()
        for token in known:
            text.push(token)
        text.take()
        every = 1 if opened.stream else UNSTREAMED_EVERY
        self._open[opened.request] = _Open(
            opened, text, len(known), [], [], every, 0, opened.stamps, deque(maxlen=KEPT_DELTAS)
        )
        prompt = None if opened.echo is None else self._text_of(opened.echo, skipped)
        opened.echo = None
        accepted = Accepted(opened.request, opened.attempt, opened.num_prompt_tokens, prompt)
        self._outputs[opened.front].accepted.append(accepted)

    def _text_of(self, ids: bytes, skipped: frozenset[int]) -> str:
        text = TextStream(self._table, skipped, ())
        for token in unpack_i32(ids).tolist():
            text.push(token)
        text.finish()
        return text.take()

    def _absorb_prompt(self, prompt: PromptLogprobs) -> None:
        state = self._open.get(prompt.request)
        if state is not None and state.opened.attempt == prompt.attempt:
            logprobs = token_logprobs(self._table, unpack_i32(prompt.ids).tolist(), prompt.logprobs)
            delta = PromptDelta(prompt.request, prompt.attempt, prompt.first, logprobs)
            self._outputs[state.opened.front].prompts.append(delta)

    def _absorb_drafted(self, drafted: Drafted) -> None:
        """The last pair of a request counts."""
        state = self._open.get(drafted.request)
        if state is not None and state.opened.attempt == drafted.attempt:
            state.accepted_drafts, state.rejected_drafts = drafted.accepted, drafted.rejected

    def _absorb_tokens(self, batch: TokenBatch) -> None:
        if not batch.requests and not batch.rows:
            return
        tokens = unpack_i32(batch.tokens).tolist()
        try:
            rows = self._reader.rows(batch)
        except LookupError as error:
            log.error("event=rows_lost error=%s", error)
            for state in self._open.values():
                self._to_scheduler.append(Resend(state.opened.request, state.opened.attempt, state.num_tokens))
            return
        start = 0
        logprobs = dict(batch.logprobs)
        for index, (request, attempt, first, count, finish, held) in enumerate(rows):
            state = self._open.get(request)
            if state is not None and state.opened.attempt == attempt:
                known = logprobs.get(index) if logprobs else None
                self._absorb_row(state, first, tokens[start : start + count], finish, bool(held), known)
            start += count

    def _absorb_row(
        self, state: _Open, first: int, tokens: list[int], finish: int, held: bool, logprobs: Logprobs | None
    ) -> None:
        if first > state.num_tokens:
            log.error("event=gap request=%d have=%d got=%d", state.opened.request, state.num_tokens, first)
            self._to_scheduler.append(Resend(state.opened.request, state.opened.attempt, state.num_tokens))
            return
        # What is here already came twice.
        scored = [] if logprobs is None else token_logprobs(self._table, tokens, logprobs)
        scored = scored[state.num_tokens - first :]
        tokens = tokens[state.num_tokens - first :]
        push, unsent = state.text.push, state.unsent
        for index, token in enumerate(tokens):
            state.num_tokens += 1
            unsent.append(token)
            if scored:
                state.unsent_logprobs.append(scored[index])
            ends_here = finish == Finish.STOP_TOKEN and index == len(tokens) - 1
            if not ends_here and push(token):
                # The last token of a row is the model's own, those before it were drafted.
                behind = min(max(len(tokens) - 2 - index, 0), state.accepted_drafts)
                state.accepted_drafts -= behind
                state.rejected_drafts += behind
                self._tell_stop(state)
                self._end(state, Finish.STOP_STRING, state.text.matched)
                return
        if finish == Finish.NONE:
            if len(unsent) >= state.every:
                self._emit(state)
            return
        if finish == Finish.STOP_TOKEN:
            reason: str | int | None = tokens[-1] if tokens else None
        else:
            reason = None
        matched = state.text.finish()
        if held:
            self._tell_stop(state)
        if matched:
            self._end(state, Finish.STOP_STRING, state.text.matched)
        else:
            self._end(state, Finish(finish), reason)

    def _tell_stop(self, state: _Open) -> None:
        self._to_scheduler.append(Stop(state.opened.request, state.opened.attempt, state.num_tokens))

    def _emit(self, state: _Open) -> None:
        """Pass on what is ready; a stream gets no event for text that is held back."""
        text = state.text.take()
        if not text and not state.unsent:
            return
        delta = TextDelta(
            state.opened.request,
            state.opened.attempt,
            state.num_tokens - len(state.unsent),
            pack_i32(state.unsent),
            text,
            state.unsent_logprobs or None,
        )
        state.unsent.clear()
        state.unsent_logprobs = []
        state.sent.append(delta)
        self._outputs[state.opened.front].deltas.append(delta)

    def _end(self, state: _Open, finish: Finish, reason: str | int | None) -> None:
        self._emit(state)
        state.stamps.sent = time.monotonic_ns()
        opened = state.opened
        # The scheduler may have counted tokens behind the stop string.
        accepted = min(state.accepted_drafts, state.num_tokens)
        del self._open[opened.request]
        self._outputs[opened.front].ended.append(
            Ended(
                opened.request,
                opened.attempt,
                finish,
                reason,
                opened.num_prompt_tokens,
                state.num_tokens,
                state.cached_tokens,
                state.stamps,
                accepted,
                state.rejected_drafts + state.accepted_drafts - accepted,
            )
        )

    def _fail(self, failed: Failed) -> None:
        state = self._open.get(failed.request)
        if state is not None and state.opened.attempt == failed.attempt:
            del self._open[failed.request]
            failed.front = state.opened.front
        if failed.front >= 0:
            self._outputs[failed.front].failed.append(failed)
