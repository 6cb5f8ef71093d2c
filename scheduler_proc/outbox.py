"""What one step has to say to the detokenizer, gathered into one StepOutput."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from engine.errors import ErrorInfo
from engine.ipc.messages import Failed, Finish, Opened, Started, StepOutput, TokenBatch
from scheduler_proc.request import Request


class SteadyRows:
    """The part of a step's message that only its rows decide, made once for as long as they stay."""

    def __init__(self, requests: np.ndarray, attempts: np.ndarray) -> None:
        """requests: uint64 [n], attempts: int32 [n]."""
        self._requests = requests
        self._attempts = attempts
        self.request_bytes = requests.tobytes()
        self.attempt_bytes = attempts.tobytes()

    def expanded(self, first_token: np.ndarray, tokens: np.ndarray) -> tuple[np.ndarray, ...]:
        """The rows as add_tokens takes them."""
        num = len(tokens)
        none = np.zeros(num, np.uint8)
        return (self._requests, self._attempts, first_token, np.ones(num, np.int32), tokens, none, none)


class Outbox:
    """Collects until `take`. Token rows keep their order."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.opened: list[Opened] = []
        self.started: list[Started] = []
        self.failed: list[Failed] = []
        self._rows: list[Callable[[], tuple[np.ndarray, ...]]] = []
        self._only_steady: tuple[SteadyRows, np.ndarray, np.ndarray] | None = None

    def __bool__(self) -> bool:
        return bool(self._rows or self.opened or self.started or self.failed)

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
            )
        )

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
    ) -> None:
        """Rows of a TokenBatch: uint64, int32, int32, int32 [n], int32 [sum(counts)], uint8, uint8 [n]."""
        self._rows.append(lambda: (requests, attempts, first_token, counts, tokens, finish, held))

    def add_steady(self, rows: SteadyRows, first_token: np.ndarray, tokens: np.ndarray) -> None:
        """One token for each of the same rows as before, none of which ends: int32 [n] each."""
        self._only_steady = (rows, first_token, tokens) if not self._rows else None
        self._rows.append(lambda: rows.expanded(first_token, tokens))

    def add_row(
        self,
        request: Request,
        first_token: int,
        tokens: np.ndarray,
        finish: Finish = Finish.NONE,
        *,
        held: bool = False,
    ) -> None:
        """One row by itself: an end without a token, or a resend."""
        one = (
            np.array([request.request], np.uint64),
            np.array([request.attempt], np.int32),
            np.array([first_token], np.int32),
            np.array([len(tokens)], np.int32),
            tokens.astype(np.int32),
            np.array([finish], np.uint8),
            np.array([held], np.uint8),
        )
        self._rows.append(lambda: one)

    def take(self, step: int) -> StepOutput:
        """The message; the outbox is empty afterwards."""
        if self._only_steady is not None and len(self._rows) == 1:
            rows, first, tokens = self._only_steady
            batch = TokenBatch(rows.request_bytes, rows.attempt_bytes, first.tobytes(), b"", tokens.tobytes())
        else:
            parts = [row() for row in self._rows]
            joined = (np.concatenate(part).tobytes() for part in zip(*parts, strict=True))
            batch = TokenBatch(*joined) if parts else TokenBatch()
        output = StepOutput(step, self.opened, self.started, batch, self.failed, time.monotonic_ns())
        self._clear()
        return output
