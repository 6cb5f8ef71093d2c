"""What one step has to say to the detokenizer, gathered into one StepOutput."""

from __future__ import annotations

import time

import numpy as np

from engine.errors import ErrorInfo
from engine.ipc.messages import Failed, Finish, Opened, Started, StepOutput, TokenBatch
from scheduler_proc.request import Request


class Outbox:
    """Collects until `take`. Token rows keep their order."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.opened: list[Opened] = []
        self.started: list[Started] = []
        self.failed: list[Failed] = []
        self._rows: list[tuple[np.ndarray, ...]] = []

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
        self._rows.append((requests, attempts, first_token, counts, tokens, finish, held))

    def add_row(self, request: Request, first_token: int, tokens: np.ndarray, finish: Finish = Finish.NONE) -> None:
        """One row by itself: an end without a token, or a resend."""
        one = (
            np.array([request.request], np.uint64),
            np.array([request.attempt], np.int32),
            np.array([first_token], np.int32),
            np.array([len(tokens)], np.int32),
            tokens.astype(np.int32),
            np.array([finish], np.uint8),
            np.zeros(1, np.uint8),
        )
        self._rows.append(one)

    def take(self, step: int) -> StepOutput:
        """The message; the outbox is empty afterwards."""
        if not self._rows:
            batch = TokenBatch()
        elif len(self._rows) == 1:
            batch = TokenBatch(*(part.tobytes() for part in self._rows[0]))
        else:
            batch = TokenBatch(*(np.concatenate(part).tobytes() for part in zip(*self._rows, strict=True)))
        output = StepOutput(step, self.opened, self.started, batch, self.failed, time.monotonic_ns())
        self._clear()
        return output
