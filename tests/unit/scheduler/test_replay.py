"""A record replays to the same plans, whatever happened in it."""

from __future__ import annotations

import random
import time
from pathlib import Path

import numpy as np
import pytest

from engine.errors import ModelFileError
from engine.ipc.messages import Abort, FlushCall, PinTokens, StatsCall, UnpinCall, pack_i32
from scheduler_proc.plan import Handle, StepPlan, StepResult
from scheduler_proc.record import Planned, read_record
from scheduler_proc.replay import replay
from scheduler_proc.worker.null import NullDevice
from tests.support.recorded import Recorded
from tests.support.scheduler import VOCAB

POLICIES = ("fcfs", "lpm", "lof", "dfs-weight", "random", "priority")


def test_a_pin_that_ends_while_nothing_happens(tmp_path: Path) -> None:
    """Without its end the request after it would find too little memory at first."""
    recorded = Recorded(tmp_path, page_size=16)
    prompt = [*range(3, 243)]
    recorded.add(1, prompt, max_tokens=1)
    recorded.run()
    recorded.inbox.messages.append(PinTokens(0, 1, pack_i32(prompt), 0.01, None))
    recorded.turn()
    assert recorded.workload.cache.tree is not None and recorded.workload.cache.tree.num_pins == 1
    time.sleep(0.02)
    recorded.turn(3)
    assert recorded.workload.cache.tree.num_pins == 0
    recorded.add(2, [*range(400, 700)], max_tokens=4)
    recorded.run()
    assert recorded.replayed().difference is None


def test_a_pin_that_ends_amid_work(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path, page_size=16)
    prompt = [*range(3, 243)]
    recorded.add(1, prompt, max_tokens=1)
    recorded.run()
    recorded.inbox.messages.append(PinTokens(0, 1, pack_i32(prompt), 0.01, None))
    recorded.add(2, [*range(400, 640)], max_tokens=30)
    recorded.add(3, [*range(400, 640)], max_tokens=30, salt="a")
    for _ in range(20):
        recorded.turn()
        time.sleep(0.001)
    recorded.run()
    assert recorded.replayed().difference is None


def test_a_random_order_stays_until_somebody_is_admitted(tmp_path: Path) -> None:
    """Looking at the queue in vain, in turns in which nothing else happens, draws nothing."""
    recorded = Recorded(tmp_path, schedule_policy="random")
    recorded.add(99, [*range(3, 403)], max_tokens=60)
    recorded.turn(3)
    for number in range(1, 20):
        recorded.add(number, [number] * 40, max_tokens=9)
        recorded.turn()
    admission = recorded.workload.planner.admission
    waiting = list(admission.waiting.values())
    assert len(waiting) > 10
    orders = [[r.request for r in admission._order(waiting)] for _ in range(2)]
    assert orders[0] == orders[1] != sorted(orders[0])
    admission.num_admitted += 1
    assert [r.request for r in admission._order(waiting)] != orders[0]
    admission.num_admitted -= 1
    recorded.run()
    assert recorded.replayed().difference is None


def test_as_many_fronts_as_the_recording_had(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    for front in (2, 0, 1):
        recorded.inbox.messages += [StatsCall(front, 1), FlushCall(front, 2), UnpinCall(front, 3, 7)]
    recorded.add(1, [3, 4, 5], max_tokens=3)
    recorded.run()
    done = recorded.replayed()
    assert (done.difference, done.num_plans) == (None, 3)


def test_penalties_and_logprobs(tmp_path: Path) -> None:
    """In a pool so small that they are retracted, and begin again in the middle of their scores."""
    recorded = Recorded(
        tmp_path, num_tokens=80, max_len=80, chunked_prefill_size=7, schedule_conservativeness=0.1, overlap_depth=1
    )
    kinds: list[dict[str, object]] = [
        {"logprobs": 3, "prompt_logprobs_from": 0},
        {"prompt_logprobs_from": 5},
        {"repetition_penalty": 1.5, "logit_bias": ((7, -2.0),), "temperature": 0.7, "logprobs": 0},
        {"frequency_penalty": 0.5, "min_tokens": 4, "stop_token_ids": (31,), "ignore_eos": False},
    ]
    for number in range(12):
        recorded.add(number, [3] * 8 + [*range(4, 4 + number)], max_tokens=25, **kinds[number % 4])
        recorded.turn(2)
    recorded.run()
    assert recorded.workload.planner.num_retractions
    plans = b"".join(entry.plan for entry in read_record(tmp_path / "record") if isinstance(entry, Planned))
    assert b"repetition_penalty" in plans and b"targets" in plans
    assert recorded.replayed().difference is None


class Failing(NullDevice):
    """Now and then it refuses a plan, loses a step, or finds NaN in a row."""

    def __init__(self, seed: int) -> None:
        super().__init__(VOCAB)
        self._random = random.Random(seed)

    def launch(self, plan: StepPlan) -> Handle:
        if self._random.random() < 0.03:
            raise RuntimeError("refused")
        return super().launch(plan)

    def collect(self, handle: Handle) -> StepResult:
        result = super().collect(handle)
        if self._random.random() < 0.03:
            raise RuntimeError("lost")
        if self._random.random() < 0.05:
            result.failed = np.zeros(len(handle.plan.rows), bool)
            result.failed[self._random.randrange(len(result.failed))] = True
        return result


def live(folder: Path, seed: int) -> Recorded:
    """Random traffic on a random scheduler; runs to its end."""
    draw = random.Random(seed)
    recorded = Recorded(
        folder,
        device=Failing(seed) if draw.random() < 0.3 else None,
        num_tokens=draw.choice([96, 160, 400]),
        max_len=80,
        schedule_policy=POLICIES[seed % len(POLICIES)],
        overlap_depth=draw.choice([0, 1, 2]),
        max_running_requests=5,
        chunked_prefill_size=draw.choice([3, 16, 200]),
        radix_eviction_policy=draw.choice(["lru", "lfu", "fifo", "priority"]),
        schedule_conservativeness=0.3,
        disable_radix_cache=draw.random() < 0.1,
    )
    prompts: list[list[int]] = []
    for _ in range(draw.randint(20, 60)):
        kind = draw.random()
        if kind < 0.4:
            trunk = [draw.choice([3, 4]) for _ in range(draw.randint(0, 4))]
            prompts.append([token for token in trunk for _ in range(8)] + draw.choices([3, 4, 5], k=draw.randint(1, 6)))
            recorded.add(
                len(prompts),
                prompts[-1],
                max_tokens=draw.randint(0, 24),
                stop=("x",) if draw.random() < 0.3 else (),
                salt=draw.choice([None, "a"]),
                priority=draw.choice([0, 0, 50]),
                logprobs=draw.choice([-1, -1, 0, 2]),
                prompt_logprobs_from=draw.choice([-1, -1, 0]),
                presence_penalty=draw.choice([0.0, 0.0, 1.0]),
            )
        elif kind < 0.8:
            for _ in range(draw.randint(1, 6)):
                recorded.turn()
        elif kind < 0.88 and prompts:
            recorded.inbox.messages.append(Abort(draw.randint(1, len(prompts)), 0))
        elif kind < 0.94 and prompts:
            ttl_s = draw.choice([0.0005, 0.002, 100.0])
            recorded.inbox.messages.append(PinTokens(1, 1, pack_i32(draw.choice(prompts)), ttl_s, None))
        elif kind < 0.96:
            recorded.inbox.messages.append(FlushCall(2, 1))
        elif kind < 0.98:
            recorded.inbox.messages.append(UnpinCall(0, 1, draw.randint(1, 3)))
        else:
            recorded.confirm()
    recorded.run()
    return recorded


def test_random_lives(tmp_path: Path) -> None:
    for seed in range(36):
        folder = tmp_path / str(seed)
        folder.mkdir()
        done = live(folder, seed).replayed()
        assert done.difference is None, (seed, done)


def test_a_plan_that_differs_is_found(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.add(1, [3, 4, 5], max_tokens=5)
    recorded.run()
    recorded.device.close()
    data = recorded.path.read_bytes()
    kv_lens = np.array([5], np.int32).tobytes()
    assert kv_lens in data
    recorded.path.write_bytes(data.replace(kv_lens, np.array([6], np.int32).tobytes(), 1))
    assert "the plan differs" in (replay(recorded.path, tmp_path).difference or "")


def test_a_record_that_is_cut_off_replays_as_far_as_it_goes(tmp_path: Path) -> None:
    recorded = Recorded(tmp_path)
    recorded.add(1, [3, 4, 5], max_tokens=9)
    recorded.run()
    recorded.device.close()
    data = recorded.path.read_bytes()
    recorded.path.write_bytes(data[: len(data) * 3 // 4])
    done = replay(recorded.path, tmp_path)
    assert done.difference is None and 0 < done.num_plans < 9


def test_what_is_no_record(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\4\0\0\0what is this")
    with pytest.raises(ModelFileError, match="not a record"):
        replay(path, tmp_path)
