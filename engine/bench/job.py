"""What is to be asked of a server, and what came of it: the structs that the parts of the benchmark share."""

from __future__ import annotations

import itertools
from typing import Literal

import msgspec

Endpoint = Literal["completions", "chat", "generate"]

ROUTES: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "generate": "/generate",
}
"""Routes that stream server-sent events."""


class BenchError(Exception):
    """The benchmark cannot run as it was asked for; the message says why."""


class Target(msgspec.Struct, frozen=True):
    """A server that is up: `base_url` has no path and no slash at its end."""

    base_url: str
    model: str
    endpoint: Endpoint
    api_key: str | None = None


class Ask(msgspec.Struct, frozen=True):
    """One request. A list is a prompt of token ids."""

    index: int
    prompt: str | list[int]
    output_len: int
    arrival_s: float = 0.0
    """Not sent before this many seconds after the start of the load."""


class Job(msgspec.Struct, frozen=True):
    """The load of one client process. All processes of a run have the same `asks` and take them from one queue."""

    target: Target
    asks: list[Ask]
    concurrency: int
    """Most requests of this process at a time."""
    run_id: str
    """Request i calls itself `<run_id>-<i>` in its x-request-id header."""
    temperature: float
    ignore_eos: bool
    timeout_s: float
    """For a whole request."""


class Record(msgspec.Struct, frozen=True):
    """One request as the client saw it. Times are seconds of CLOCK_MONOTONIC; counts are the server's own."""

    index: int
    sent: float
    end: float
    """The end of the stream, or when the request failed."""
    arrivals: list[float] = []
    """When text arrived: one time for all chunks that were read together."""
    num_chunks: int = 0
    """Chunks that brought text."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """The kind of failure; empty if there was none."""
    message: str = ""
    """What the failure says of itself."""

    @property
    def first(self) -> float:
        """When the first text came; an answer without any text has its end here."""
        return self.arrivals[0] if self.arrivals else self.end

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.first - self.sent

    @property
    def e2e_s(self) -> float:
        """From sending to the end of the stream."""
        return self.end - self.sent

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Between neighbouring arrivals of text."""
        return [later - earlier for earlier, later in itertools.pairwise(self.arrivals)]


class Outcome(msgspec.Struct, frozen=True):
    """What one client process, or all of them together, did."""

    records: list[Record]
    busy: float
    """Share of the time that the (busiest) process had work for its core; near 1 the client holds the server back."""
