"""What one step has to say to the detokenizer, gathered into one StepOutput."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from engine.errors import ErrorInfo
from engine.ipc.messages import (
    Drafted,
    Failed,
    Finish,
    Logprobs,
    Opened,
    PromptLogprobs,
    Started,
    StepOutput,
    TokenBatch,
    unpack_i32,
    unpack_u64,
)
from scheduler_proc.request import Request


class SteadyRows:
    """Rows that get one token a step for as long as they stay: a message names them once, later ones refer to it."""

    def __init__(self, of: object, requests: np.ndarray, attempts: np.ndarray, first_token: np.ndarray) -> None:
        """of: what they are the rows of; requests: uint64 [n], attempts: int32 [n], first_token: int32 [n]."""
        self.of = of
        self.requests = requests
        self.attempts = attempts
        self.first_token = first_token
        self.num_steps = 0
        """Steps that went by since `first_token`."""
        self.name = 0
        """What the receiver knows them by; 0 = it was not told."""

    def expanded(self, ahead: int, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows as add_tokens takes them, `ahead` steps after the first."""
        num = len(tokens)
        none = np.zeros(num, np.uint8)
        return (self.requests, self.attempts, self.first_token + ahead, np.ones(num, np.int32), tokens, none, none)


class Outbox:
    """Collects until `take`. Token rows keep their order."""

    def __init__(self) -> None:
        self._told: SteadyRows | None = None
        """The rows that the receiver knows by name."""
        self._names = 0
        self._clear()

    def _clear(self) -> None:
        self.opened: list[Opened] = []
        self.started: list[Started] = []
        self.failed: list[Failed] = []
        self.prompts: list[PromptLogprobs] = []
        self.drafted: list[Drafted] = []
        self._rows: list[Callable[[], tuple[np.ndarray, ...]]] = []
        self._num_rows = 0
        self._logprobs: list[tuple[int, Logprobs]] = []
        self._only_steady: tuple[SteadyRows, int, np.ndarray] | None = None

    def __bool__(self) -> bool:
        return bool(self._rows or self.opened or self.started or self.failed or self.prompts or self.drafted)

    def _add(self, rows: Callable[[], tuple[np.ndarray, ...]], num: int) -> None:
        self._rows.append(rows)
        self._num_rows += num

    def open(self, request: Request) -> None:
        self.opened.append(
            Opened(
                request.request,
                request.attempt,
                request.front,
                request.stream,
                len(request.prompt_ids),
                request.sampling.stop,
                request.sampling.skip_special_tokens,
                request.output_ids.tobytes(),
                request.stamps,
                request.sampling.min_tokens,
                request.sampling.keep_stop,
                request.prompt_ids.tobytes() if request.echo else None,
            )
        )

    def add_prompt(self, request: Request, first: int, ids: np.ndarray, logprobs: Logprobs) -> None:
        """Logprobs of prompt tokens from index `first` on; int32 [m]."""
        ids = np.ascontiguousarray(ids, np.int32)
        self.prompts.append(PromptLogprobs(request.request, request.attempt, first, ids.tobytes(), logprobs))

    def add_drafted(self, request: Request, accepted: int, rejected: int) -> None:
        """How many of its drafted tokens are among those sent so far, and how many are not. Beside its end, and where
        its text may end earlier, beside every row of its."""
        self.drafted.append(Drafted(request.request, request.attempt, accepted, rejected))

    def fail(self, request: int, attempt: int, front: int, error: ErrorInfo) -> None:
        self.failed.append(Failed(request, attempt, front, error))

    def add_tokens(
        self,
        requests: np.ndarray,
        attempts: np.ndarray,
        first_token: np.ndarray,
        counts: np.ndarray,
        tokens: np.ndarray,
        finish: np.ndarray,
        held: np.ndarray,
        logprobs: list[tuple[int, Logprobs]],
    ) -> None:
        """Rows of a TokenBatch: uint64, int32, int32, int32 [n], int32 [sum(counts)], uint8, uint8 [n]; logprobs by
        index of the row."""
        self._logprobs += [(self._num_rows + index, one) for index, one in logprobs]
        self._add(lambda: (requests, attempts, first_token, counts, tokens, finish, held), len(requests))

    def add_steady(self, rows: SteadyRows, tokens: np.ndarray) -> None:
        """One token for each of the same rows as before, none of which ends: int32 [n]."""
        ahead, rows.num_steps = rows.num_steps, rows.num_steps + 1
        self._only_steady = (rows, ahead, tokens) if not self._rows else None
        self._add(lambda: rows.expanded(ahead, tokens), len(tokens))

    def add_row(
        self,
        request: Request,
        first_token: int,
        tokens: np.ndarray,
        finish: Finish = Finish.NONE,
        *,
        held: bool = False,
        logprobs: Logprobs | None = None,
    ) -> None:
        """One row by itself: an end without a token, or a resend."""
        if logprobs is not None:
            self._logprobs.append((self._num_rows, logprobs))
        one = (
            np.array([request.request], np.uint64),
            np.array([request.attempt], np.int32),
            np.array([first_token], np.int32),
            np.array([len(tokens)], np.int32),
            tokens.astype(np.int32),
            np.array([finish], np.uint8),
            np.array([held], np.uint8),
        )
        self._add(lambda: one, 1)

    def take(self, step: int) -> StepOutput:
        """The message; the outbox is empty afterwards."""
        if self._only_steady is not None and len(self._rows) == 1:
            batch = self._steady_batch(*self._only_steady)
        else:
            parts = [row() for row in self._rows]
            batch = TokenBatch()
            if parts:
                names = ("requests", "attempts", "first_token", "counts", "tokens", "finish", "held")
                for name, columns in zip(names, zip(*parts, strict=True), strict=True):
                    setattr(batch, name, np.concatenate(columns).tobytes())
                batch.logprobs = self._logprobs
        output = StepOutput(
            step, self.opened, self.started, batch, self.failed, time.monotonic_ns(), self.prompts, self.drafted
        )
        self._clear()
        return output

    def named_in(self, output: StepOutput) -> tuple[list[int], list[int]]:
        """Requests of a message's token rows, and their attempts; for a message that could not be sent."""
        batch = output.tokens
        rows, self._told = self._told, None
        if batch.rows and not batch.requests:
            assert rows is not None
            return rows.requests.tolist(), rows.attempts.tolist()
        return unpack_u64(batch.requests).tolist(), unpack_i32(batch.attempts).tolist()

    def _steady_batch(self, rows: SteadyRows, ahead: int, tokens: np.ndarray) -> TokenBatch:
        if self._told is rows:
            return TokenBatch(tokens=tokens.tobytes(), rows=rows.name, ahead=ahead)
        self._names += 1
        rows.name = self._names
        self._told = rows
        first = rows.first_token
        return TokenBatch(
            rows.requests.tobytes(),
            rows.attempts.tobytes(),
            first.tobytes(),
            tokens=tokens.tobytes(),
            rows=rows.name,
            ahead=ahead,
        )
