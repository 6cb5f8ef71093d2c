"""Traffic: chats, questions about documents, agents. Each yields requests in order of arrival, made when asked for.

Traces are open loop: a request comes at its time however late the answers before it are, so that every policy sees the
same traffic. A next turn comes a think time after its last one, and holds the answer that the device gives to it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tools.sim.arrivals import arrival_times
from tools.sim.device import FIRST_TEXT_ID, VOCAB, answer_ids

LONGEST_CONTEXT = 16_384
"""Prompt and answer of one request together; a conversation that reaches it is over."""
LONGEST_ANSWER = 4096
TOKENS_PER_S = 60.0
"""How fast an answer is taken to come when the time of the next turn is drawn."""


class SimRequest(NamedTuple):
    """One request of a trace; numbers count from 1."""

    number: int
    arrival_s: float
    prompt: np.ndarray
    """int32"""
    answer_len: int


class Source:
    """Draws of one trace. `scale` multiplies all lengths."""

    def __init__(self, seed: int, scale: float) -> None:
        self.draw = random.Random(seed)
        self.scale = scale
        self._tokens = np.random.default_rng(seed)

    def tokens(self, count: int) -> np.ndarray:
        """int32 [count]: text that nobody else has."""
        return self._tokens.integers(FIRST_TEXT_ID, VOCAB, count, np.int32)

    def length(self, median: float, sigma: float, longest: int) -> int:
        """A heavy-tailed length: log-normal, in 1..longest."""
        drawn = self.draw.lognormvariate(math.log(median), sigma)
        return max(1, min(int(drawn * self.scale), longest))

    def uniform(self, least: int, most: int) -> int:
        return max(1, int(self.draw.uniform(least, most) * self.scale))


class Turn(NamedTuple):
    """A request that may be sent from `ready_s` on. Ordered by time, then by the order in which they were made."""

    ready_s: float
    order: int
    context: np.ndarray
    """int32: all that the next prompt begins with."""
    kind: int
    """Which app or agent."""
    depth: int
    left: list[int]
    """Requests that its conversation or task may still make, counted for all its branches together."""


def _threads(
    source: Source,
    times: Iterator[float],
    begin: Callable[[], Turn],
    ask: Callable[[Turn], tuple[np.ndarray, int]],
    go_on: Callable[[Turn, np.ndarray, int, float], list[Turn]],
) -> Iterator[SimRequest]:
    """At each arrival the turn that is ready longest; a new thread begins where none is."""
    ready: list[Turn] = []
    for index, now in enumerate(times):
        number = index + 1
        turn = heapq.heappop(ready) if ready and ready[0].ready_s <= now else begin()
        prompt, answer_len = ask(turn)
        yield SimRequest(number, now, prompt, answer_len)
        if len(prompt) + answer_len < LONGEST_CONTEXT // 2:
            context = np.concatenate([prompt, answer_ids(number, len(prompt), answer_len)])
            for following in go_on(turn, context, number, now + answer_len / TOKENS_PER_S):
                heapq.heappush(ready, following)


def chat(source: Source, times: Iterator[float]) -> Iterator[SimRequest]:
    """Conversations of about five turns in eight apps, each with its own system prompt."""
    draw = source.draw
    systems = [source.tokens(source.uniform(200, 1200)) for _ in range(8)]

    def begin() -> Turn:
        app = min(int(draw.expovariate(0.5)), len(systems) - 1)
        turns = 1 + min(int(draw.expovariate(1 / 4)), 24)
        return Turn(0.0, 0, systems[app], app, 0, [turns])

    def ask(turn: Turn) -> tuple[np.ndarray, int]:
        message = source.tokens(source.length(50, 1.0, 2000))
        return np.concatenate([turn.context, message]), source.length(130, 0.9, LONGEST_ANSWER)

    def go_on(turn: Turn, context: np.ndarray, number: int, answered_s: float) -> list[Turn]:
        turn.left[0] -= 1
        if turn.left[0] <= 0:
            return []
        return [Turn(answered_s + draw.expovariate(1 / 15), number, context, turn.kind, turn.depth + 1, turn.left)]

    return _threads(source, times, begin, ask, go_on)


def rag(source: Source, times: Iterator[float]) -> Iterator[SimRequest]:
    """Short questions behind one of 300 documents of 1-4k tokens, whose popularity follows Zipf's law."""
    draw = source.draw
    system = source.tokens(source.uniform(60, 120))
    documents = [np.concatenate([system, source.tokens(source.uniform(1000, 4000))]) for _ in range(300)]
    popularity = list(accumulate(1 / rank for rank in range(1, len(documents) + 1)))
    for index, now in enumerate(times):
        document = draw.choices(documents, cum_weights=popularity)[0]
        prompt = np.concatenate([document, source.tokens(source.length(30, 0.6, 400))])
        yield SimRequest(index + 1, now, prompt, source.length(90, 0.8, LONGEST_ANSWER))


def agents(source: Source, times: Iterator[float]) -> Iterator[SimRequest]:
    """Tasks of up to 24 calls behind one of six tool preambles; a call's result goes on in one to three branches."""
    draw = source.draw
    preambles = [source.tokens(source.uniform(1500, 3000)) for _ in range(6)]

    def begin() -> Turn:
        kind = draw.randrange(len(preambles))
        return Turn(0.0, 0, preambles[kind], kind, 0, [draw.randint(4, 24)])

    def ask(turn: Turn) -> tuple[np.ndarray, int]:
        observation = source.tokens(source.length(150, 1.0, 3000))
        return np.concatenate([turn.context, observation]), source.length(60, 1.0, LONGEST_ANSWER)

    def go_on(turn: Turn, context: np.ndarray, number: int, answered_s: float) -> list[Turn]:
        branches = min(draw.choices((1, 2, 3), (0.7, 0.2, 0.1))[0], turn.left[0])
        turn.left[0] -= branches
        # The tool runs between the calls; branches of one call start together.
        ready_s = answered_s + draw.expovariate(1 / 3)
        return [
            Turn(ready_s, number * 4 + branch, context, turn.kind, turn.depth + 1, turn.left)
            for branch in range(branches)
        ]

    return _threads(source, times, begin, ask, go_on)


TRACES: dict[str, Callable[[Source, Iterator[float]], Iterator[SimRequest]]] = {
    "chat": chat,
    "rag": rag,
    "agents": agents,
}


def requests(trace: str, arrivals: str, rate: float, num: int, seed: int, scale: float = 1.0) -> Iterator[SimRequest]:
    """The first `num` requests of a trace. Arrivals draw from a stream of their own."""
    times = arrival_times(arrivals, rate, random.Random(seed + 1))
    made = TRACES[trace](Source(seed, scale), times)
    for _ in range(num):
        yield next(made)
