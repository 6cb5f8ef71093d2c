"""Traffic: in order, reproducible, with the shared prefixes that it promises."""

from __future__ import annotations

import random
from itertools import islice, pairwise

import numpy as np
import pytest

from tools.sim.arrivals import ARRIVALS, arrival_times
from tools.sim.device import FIRST_TEXT_ID, VOCAB, answer_ids
from tools.sim.traces import LONGEST_ANSWER, LONGEST_CONTEXT, TRACES, requests


@pytest.mark.parametrize("kind", ARRIVALS)
def test_arrivals_ascend_at_their_rate(kind: str) -> None:
    times = list(islice(arrival_times(kind, 50.0, random.Random(3)), 30_000))
    assert all(earlier < later for earlier, later in pairwise(times))
    assert len(times) / times[-1] == pytest.approx(50, rel=0.15)


def test_bursts_are_bursts() -> None:
    def variation(kind: str) -> float:
        times = np.array(list(islice(arrival_times(kind, 50.0, random.Random(3)), 20_000)))
        per_second = np.bincount(times.astype(int))
        return float(per_second.var() / per_second.mean())

    assert variation("poisson") < 2 < 10 < variation("bursty")


@pytest.mark.parametrize("trace", TRACES)
def test_requests_are_numbered_in_order_and_reproducible(trace: str) -> None:
    first = list(requests(trace, "poisson", 20.0, 300, seed=7))
    again = list(requests(trace, "poisson", 20.0, 300, seed=7))
    other = list(requests(trace, "poisson", 20.0, 300, seed=8))
    assert [request.number for request in first] == list(range(1, 301))
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(first))
    for one, two in zip(first, again, strict=True):
        assert one.arrival_s == two.arrival_s and one.answer_len == two.answer_len
        assert np.array_equal(one.prompt, two.prompt)
    assert [request.answer_len for request in first] != [request.answer_len for request in other]
    for request in first:
        assert request.prompt.dtype == np.int32
        assert request.prompt.min() >= FIRST_TEXT_ID and request.prompt.max() < VOCAB
        assert 1 <= request.answer_len <= LONGEST_ANSWER
        assert len(request.prompt) + request.answer_len <= LONGEST_CONTEXT + LONGEST_ANSWER


@pytest.mark.parametrize("trace", ["chat", "agents"])
def test_a_next_turn_holds_the_answer_before_it(trace: str) -> None:
    made = list(requests(trace, "poisson", 20.0, 400, seed=1))
    ends = {}
    for request in made:
        answer = answer_ids(request.number, len(request.prompt), request.answer_len)
        ends[tuple(answer[-4:].tolist()), len(request.prompt) + request.answer_len] = request
    followed = 0
    for request in made:
        for (tail, length), before in ends.items():
            if length < len(request.prompt) and tuple(request.prompt[length - len(tail) : length].tolist()) == tail:
                assert np.array_equal(before.prompt, request.prompt[: len(before.prompt)])
                assert before.arrival_s < request.arrival_s
                followed += 1
                break
    assert followed > 80


def test_popular_documents_come_again() -> None:
    heads = [tuple(request.prompt[:400].tolist()) for request in requests("rag", "poisson", 20.0, 500, seed=1)]
    assert 50 < len(set(heads)) < 300
