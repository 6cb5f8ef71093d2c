"""What became of each request, as arrays over all of them; written once a step without a loop over rows."""

from __future__ import annotations

import msgspec
import numpy as np

from engine.ipc.messages import RowReader, StepOutput
from tools.sim.clock import Clock
from tools.sim.traces import SimRequest

NEVER = np.iinfo(np.int32).max
GAP_BINS_PER_E = 200
"""Gaps are counted in logarithmic bins of half a percent."""
LEAST_GAP_S, NUM_BINS = 1e-5, 4000
FLUSH = 1 << 14
"""Gaps that are put into bins at a time."""


class Gaps:
    """Times between two tokens of one request, over all requests."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._kept: list[np.ndarray] = []
        self._num_kept = 0
        self.largest_s = 0.0

    def add(self, gaps_s: np.ndarray) -> None:
        """float64 [n]; the array is kept."""
        self._kept.append(gaps_s)
        self._num_kept += len(gaps_s)
        if self._num_kept >= FLUSH:
            self._flush()

    def percentiles_s(self, shares: tuple[float, ...]) -> list[float]:
        """The middle of the bin where each share (0..1) of the gaps is reached; 0 without any gap."""
        self._flush()
        reached = np.cumsum(self._counts)
        if reached[-1] == 0:
            return [0.0] * len(shares)
        bins = np.searchsorted(reached, np.array(shares) * reached[-1])
        return [float(value) for value in LEAST_GAP_S * np.exp((bins + 0.5) / GAP_BINS_PER_E)]

    def _flush(self) -> None:
        if self._num_kept == 0:
            return
        gaps = np.concatenate(self._kept)
        self._kept, self._num_kept = [], 0
        self.largest_s = max(self.largest_s, float(gaps.max()))
        bins = (np.log(np.maximum(gaps, LEAST_GAP_S) / LEAST_GAP_S) * GAP_BINS_PER_E).astype(np.int64)
        self._counts += np.bincount(np.minimum(bins, NUM_BINS - 1), minlength=NUM_BINS)


class Ledger:
    """Where the scheduler's messages go. Index = request number; entry 0 is nobody's. Times in virtual seconds."""

    def __init__(self, clock: Clock, num: int) -> None:
        self.arrival_s = np.zeros(num + 1)
        self.prompt_len = np.zeros(num + 1, np.int32)
        self.answer_len = np.zeros(num + 1, np.int32)
        """What the trace wants."""
        self.got = np.zeros(num + 1, np.int32)
        """Output tokens that have come."""
        self.cached = np.zeros(num + 1, np.int32)
        self.first_s = np.zeros(num + 1)
        self.last_s = np.zeros(num + 1)
        self.finish = np.zeros(num + 1, np.uint8)
        self.stop_at = np.full(num + 1, NEVER, np.int32)
        """Length at which a request of unknown length says its stop token."""
        self.gaps = Gaps()
        self.num_arrived = 0
        self.num_finished = 0
        self._clock = clock
        self._reader = RowReader()

    def arrive(self, request: SimRequest, *, says_stop: bool) -> None:
        number = request.number
        self.num_arrived += 1
        self.arrival_s[number] = request.arrival_s
        self.prompt_len[number] = len(request.prompt)
        self.answer_len[number] = request.answer_len
        if says_stop:
            # The token after `length` tokens is sampled with that length in the cache.
            self.stop_at[number] = len(request.prompt) + request.answer_len - 1

    def send(self, message: msgspec.Struct) -> None:
        """Take in a step's output; raises RuntimeError if a request failed or tokens are out of order."""
        assert isinstance(message, StepOutput)
        if message.failed:
            failed = message.failed[0]
            raise RuntimeError(f"request {failed.request} failed: {failed.error.message}")
        batch = message.tokens
        if not batch.tokens and not batch.requests:
            return
        now_s = self._clock.now_s
        requests, _, first = self._reader.columns(batch)
        numbers = requests.astype(np.int64)
        before = self.got[numbers]
        if (before != first).any() or len(batch.tokens) != 4 * len(numbers):
            raise RuntimeError(f"step {message.step}: output tokens are out of order")
        self.got[numbers] = before + 1
        if message.started:
            for started in message.started:
                self.cached[started.request] = started.cached_tokens
            new = before == 0
            self.first_s[numbers[new]] = now_s
            going_on = numbers[~new]
            self.gaps.add(now_s - self.last_s[going_on])
        else:
            self.gaps.add(now_s - self.last_s[numbers])
        self.last_s[numbers] = now_s
        if batch.finish:
            finish = np.frombuffer(batch.finish, np.uint8)
            ended = finish != 0
            self.finish[numbers[ended]] = finish[ended]
            self.num_finished += int(ended.sum())
