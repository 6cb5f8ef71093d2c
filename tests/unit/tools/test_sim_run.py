"""The simulator: every request gets its answer, time runs forward, and times are what a hand computes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from engine.config import SchedulerOptions
from engine.ipc.messages import Finish
from tools.sim.clock import Clock
from tools.sim.cost import StepCost, fit
from tools.sim.device import FIRST_TEXT_ID
from tools.sim.ledger import Gaps
from tools.sim.run import Run, simulate
from tools.sim.summary import Summary, heading, line, summarise
from tools.sim.traces import TRACES, SimRequest, requests

POLICIES = ("fcfs", "lpm", "lof", "dfs-weight", "random", "priority")
ROUND = StepCost(base=10.0, decode_row=1.0, kv_token=0.0, prefill_token=0.5, pair=0.0)
"""A step of d decoding rows and p prompt tokens takes 10 + d + p / 2 ms."""


def options(**changed: object) -> SchedulerOptions:
    values: dict[str, object] = {
        "device": "null",
        "max_running_requests": 32,
        "chunked_prefill_size": 512,
        "max_total_tokens": 40_000,
        "overlap_depth": 1,
    }
    return msgspec.convert({**values, **changed}, SchedulerOptions)


def run(trace: str, num: int, *, unknown_lengths: bool = False, seed: int = 1, **changed: object) -> Run:
    made = requests(trace, "bursty", 400.0, num, seed, scale=0.15)
    return simulate(made, num, options(**changed), fit().cost, unknown_lengths=unknown_lengths)


def summary(done: Run) -> Summary:
    return summarise(done, trace="", arrivals="", rate=1.0, policy="fcfs", slo_ttft_ms=1000, slo_itl_ms=50)


def by_hand(*arrivals: tuple[float, int, int], unknown_lengths: bool = False, **changed: object) -> Run:
    """Unrelated prompts: (arrival, prompt tokens, answer tokens) each."""
    made: Sequence[SimRequest] = [
        SimRequest(number, arrival_s, np.arange(prompt, dtype=np.int32) + FIRST_TEXT_ID + 1000 * number, answer)
        for number, (arrival_s, prompt, answer) in enumerate(arrivals, 1)
    ]
    return simulate(made, len(made), options(**changed), ROUND, unknown_lengths=unknown_lengths)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("trace", TRACES)
def test_every_request_ends_with_its_length(trace: str, policy: str) -> None:
    done = run(trace, 40, schedule_policy=policy)
    ledger = done.ledger
    assert (ledger.got == ledger.answer_len).all()
    assert (ledger.finish[1:] == Finish.LENGTH).all()
    assert (ledger.first_s[1:] > ledger.arrival_s[1:]).all() and (ledger.last_s >= ledger.first_s).all()
    assert (ledger.cached[1:] < ledger.prompt_len[1:]).all()
    # What was not in the cache was computed.
    assert done.prefilled >= int((ledger.prompt_len - ledger.cached).sum())


def test_unknown_lengths_end_by_a_stop_token_at_the_same_length() -> None:
    ledger = run("chat", 80, unknown_lengths=True).ledger
    assert (ledger.got == ledger.answer_len).all()
    assert (ledger.finish[1:] == Finish.STOP_TOKEN).all()


def test_tokens_add_up_through_retractions() -> None:
    # Twelve answers of 200 tokens that nobody expects, in a pool that holds four of them.
    done = by_hand(*[(0.0, 32, 200)] * 12, unknown_lengths=True, max_total_tokens=1024, schedule_conservativeness=0.01)
    assert done.num_retractions > 0
    assert (done.ledger.got == done.ledger.answer_len).all()
    assert 0.5 < summary(done).pool <= 1


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_same_seed_gives_the_same_numbers(depth: int) -> None:
    def numbers(seed: int) -> Summary:
        done = run("agents", 60, seed=seed, schedule_policy="random", overlap_depth=depth, random_seed=seed)
        return msgspec.structs.replace(summary(done), wall_s=0.0, steps_per_s=0.0)

    assert numbers(1) == numbers(1) != numbers(2)


def test_the_clock_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def advance_to(self: Clock, time_s: float) -> None:
        advance(self, time_s)
        seen.append(self.now_s)

    advance = Clock.advance_to
    monkeypatch.setattr(Clock, "advance_to", advance_to)
    done = run("rag", 60)
    assert len(seen) >= done.num_steps and seen == sorted(seen)
    assert done.busy_s <= done.end_s


def test_first_token_times_by_hand() -> None:
    # The prompt of 100 tokens takes one step of 10 + 50 ms; each of the two tokens after it one of 10 + 1 ms.
    done = by_hand((1.0, 100, 3), overlap_depth=0)
    ledger = done.ledger
    assert ledger.first_s[1] == pytest.approx(1.060)
    assert ledger.last_s[1] == pytest.approx(1.082)
    assert done.num_steps == 3 and done.end_s == pytest.approx(1.082)


def test_overlap_launches_the_next_step_before_the_last_is_collected() -> None:
    # A comes at 1 s: its prompt ends at 1.060. Step 2 (A decodes) is launched at once, so B, who comes at 1.010, is in
    # step 3 at the earliest: launched at 1.060, it begins when step 2 ends at 1.071, and takes 10 + 1 + 20 ms.
    ledger = by_hand((1.0, 100, 4), (1.010, 40, 1)).ledger
    assert ledger.first_s[1] == pytest.approx(1.060)
    assert ledger.first_s[2] == pytest.approx(1.102)
    # A's tokens: steps 1, 2, 3 and, without B, 4.
    assert ledger.last_s[1] == pytest.approx(1.113)


def test_a_long_prompt_comes_in_chunks() -> None:
    # 512 and 88 tokens: 10 + 256 and 10 + 44 ms.
    ledger = by_hand((0.5, 600, 1)).ledger
    assert ledger.first_s[1] == pytest.approx(0.5 + 0.266 + 0.054)


def test_host_time_delays_the_launch() -> None:
    made = [SimRequest(1, 0.0, np.arange(20, 30, dtype=np.int32), 1)]
    ledger = simulate(made, 1, options(), ROUND, host_us=2000).ledger
    assert ledger.first_s[1] == pytest.approx(0.002 + 0.015)


def test_a_prefix_is_computed_once() -> None:
    prompt = np.arange(100, 260, dtype=np.int32)
    made = [SimRequest(1, 0.0, prompt, 1), SimRequest(2, 5.0, prompt, 1)]
    done = simulate(made, 2, options(), ROUND)
    # One token at least is computed again, and pages are shared whole.
    assert done.ledger.cached.tolist() == [0, 0, 144]
    assert summary(done).hit_rate == 144 / 320


def test_gaps_know_their_percentiles() -> None:
    gaps = Gaps()
    gaps.add(np.repeat([0.01, 0.02, 0.5], [700, 280, 20]))
    assert gaps.percentiles_s((0.5, 0.9, 0.99)) == pytest.approx([0.01, 0.02, 0.5], rel=0.005)
    assert gaps.largest_s == 0.5
    assert Gaps().percentiles_s((0.5,)) == [0.0]


def test_goodput_counts_those_within_both_objectives() -> None:
    done = by_hand((0.0, 100, 3), (2.0, 500, 1), overlap_depth=0)
    # First tokens after 60 and 260 ms; 11 ms between tokens.
    row = summarise(done, trace="", arrivals="", rate=1.0, policy="fcfs", slo_ttft_ms=100, slo_itl_ms=12)
    assert row.within_slo == 0.5 and row.goodput == pytest.approx(1 / 2.26)
    assert row.ttft_p50 == pytest.approx(160) and row.retractions == 0
    assert len(heading()) == len(line(row))
