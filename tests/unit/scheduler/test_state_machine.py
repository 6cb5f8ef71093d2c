"""Tree, pools and planner together against a naive model: random requests, aborts, pins, forks, faults, page by page.

The model knows every sequence that was computed, by namespace. What a request finds cached can never exceed its
longest common prefix with one of them, and in a pool that never has to evict it is exactly what was put in.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.ipc.messages import Abort, Finish, FlushCall, PinTokens, Resend, Stop, UnpinCall, pack_i32
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.plan import Handle, StepResult
from scheduler_proc.worker.null import NullDevice
from tests.support.scheduler import FULL, VOCAB, Harness, expected_null_tokens, pages_kept

WINDOW = CacheGroup("window", "window", 12)
SALTS = [None, "a", "b"]


class SometimesNan(NullDevice):
    """The null device, whose first row can be made to fail."""

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.fail_next = False

    def collect(self, handle: Handle) -> StepResult:
        result = super().collect(handle)
        if self.fail_next and handle.plan.sample[0]:
            self.fail_next = False
            result.failed = np.zeros(len(handle.plan.rows), bool)
            result.failed[0] = True
        return result


class SchedulerMachine(RuleBasedStateMachine):
    """Rules are what clients, operators, the detokenizer and time can do."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.number = 0
        self.prompts: dict[int, tuple[str | None, list[int]]] = {}
        self.pins: list[int] = []
        self.unconfirmed: dict[int, int] = {}

    @initialize(
        depth=st.integers(0, 2),
        page_size=st.sampled_from([1, 4]),
        num_pages=st.sampled_from([24, 40, 400]),
        windowed=st.booleans(),
        policy=st.sampled_from(["fcfs", "lpm", "lof", "dfs-weight", "random", "priority"]),
        step_tokens=st.sampled_from([3, 16, 200]),
        radix=st.sampled_from([True, True, True, False]),
    )
    def start(
        self, depth: int, page_size: int, num_pages: int, windowed: bool, policy: str, step_tokens: int, radix: bool
    ) -> None:
        pages = num_pages * 4 // page_size
        self.roomy = num_pages == 400 and not windowed and radix
        self.device = SometimesNan()
        self.harness = Harness(
            Path(self.folder.name),
            device=self.device,
            depth=depth,
            page_size=page_size,
            num_pages=pages,
            groups=(FULL, WINDOW) if windowed else (FULL,),
            max_len=80,
            num_slots=5,
            step_tokens=step_tokens,
            policy=policy,
            conservativeness=0.3,
            radix=radix,
            confirm_holds=False,
        )
        self.computed: dict[str | None, list[list[int]]] = {salt: [] for salt in SALTS}
        self.flushed = False

    @rule(
        trunk=st.lists(st.sampled_from([3, 4]), min_size=0, max_size=4),
        tail=st.lists(st.integers(3, 5), min_size=1, max_size=6),
        output=st.integers(1, 30),
        stops=st.booleans(),
        salt=st.sampled_from(SALTS),
        priority=st.sampled_from([0, 0, 50]),
    )
    def request(
        self, trunk: list[int], tail: list[int], output: int, stops: bool, salt: str | None, priority: int
    ) -> None:
        self._add([token for token in trunk for _ in range(8)] + tail, output, stops, salt, priority)

    @precondition(lambda self: self.harness.finish)
    @rule(data=st.data(), cut=st.integers(0, 12), output=st.integers(1, 12))
    def fork(self, data: st.DataObject, cut: int, output: int) -> None:
        """Go on from somewhere in an earlier answer, twice."""
        number = data.draw(st.sampled_from(sorted(self.harness.finish)))
        salt, prompt = self.prompts[number]
        known = [*prompt, *self.harness.tokens.get(number, [])]
        known = known[: max(len(known) - cut, 1)][:60]
        for last in (6, 7):
            self._add([*known, last], output, False, salt, 0)

    def _add(self, prompt: list[int], output: int, stops: bool, salt: str | None, priority: int) -> None:
        self.number += 1
        self.prompts[self.number] = (salt, prompt)
        stop = ("never",) if stops else ()
        self.harness.add(self.number, prompt, max_tokens=output, stop=stop, salt=salt, priority=priority)

    @rule(times=st.integers(1, 12))
    def turns(self, times: int) -> None:
        for _ in range(times):
            self.harness.turn()
            self._look()

    @precondition(lambda self: self.number)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.harness.inbox.messages.append(Abort(data.draw(st.integers(1, self.number)), 0))

    @precondition(lambda self: self.harness.workload.requests)
    @rule(data=st.data())
    def resend(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.harness.workload.requests)))
        have = self.harness.tokens.get(number, [])
        at = data.draw(st.integers(0, len(have)))
        if number not in self.harness.finish:
            self.harness.inbox.messages.append(Resend(number, 0, at))

    @rule()
    def confirm(self) -> None:
        """The detokenizer confirms every held end it knows of."""
        for number, slot in [(int(self.harness.slots.request[s]), s) for s in self.harness.slots.used()]:
            if self.harness.slots.state[slot] == 3:
                count = self.harness.slots.num_output(slot)
                self.harness.inbox.messages.append(Stop(number, 0, count))

    @precondition(lambda self: self.harness.workload.requests)
    @rule(data=st.data())
    def stop_early(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.harness.workload.requests)))
        count = len(self.harness.tokens.get(number, []))
        if count and number not in self.harness.finish:
            self.harness.finish[number] = Finish.STOP_STRING
            self.harness.stopped.add(number)
            self.harness.inbox.messages.append(Stop(number, 0, count))

    @precondition(lambda self: self.number and self.harness.cache.tree is not None)
    @rule(data=st.data(), ttl=st.sampled_from([0.001, 1000.0]))
    def pin(self, data: st.DataObject, ttl: float) -> None:
        salt, prompt = self.prompts[data.draw(st.integers(1, self.number))]
        reply = self.harness.workload.answer(PinTokens(0, 1, pack_i32(prompt), ttl, salt))
        if reply.error is None and len(self.pins) < 2:
            self.pins.append(reply.values["pin"])
        elif reply.error is None:
            self.harness.workload.answer(UnpinCall(0, 1, reply.values["pin"]))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        self.harness.workload.answer(UnpinCall(0, 1, self.pins.pop()))

    @rule()
    def flush(self) -> None:
        self.flushed = True
        self.harness.workload.answer(FlushCall(0, 1))

    @rule()
    def nan(self) -> None:
        self.device.fail_next = True

    def _look(self) -> None:
        """What the model has to say about everything that has ended or begun since."""
        harness = self.harness
        for number, tokens in harness.tokens.items():
            salt, prompt = self.prompts[number]
            assert tokens == expected_null_tokens(len(prompt), len(tokens))
        for number, cached in list(harness.cached.items()):
            salt, prompt = self.prompts[number]
            longest = max((common(prompt, other) for _, other in self.same_salt(salt, number)), default=0)
            page = harness.cache.page_size
            assert cached % page == 0
            assert cached <= min(longest, len(prompt) - 1)

    def same_salt(self, salt: str | None, but: int) -> list[tuple[int, list[int]]]:
        """Everything that may have been computed under a salt: prompts and answers."""
        return [
            (number, [*prompt, *expected_null_tokens(len(prompt), 40)])
            for number, (other, prompt) in self.prompts.items()
            if other == salt and number != but
        ]

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if hasattr(self, "harness"):
            assert self.harness.workload.audit() == []
            assert self.harness.slots.num_used + self.harness.slots.num_free == self.harness.slots.num_slots

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            for _ in range(3000):
                if self.harness.scheduler.idle and not self.harness.inbox.messages:
                    break
                self.confirm()
                self.harness.turn()
            else:
                raise AssertionError("the scheduler does not come to rest")
            self._look()
            assert self.harness.workload.audit() == []
            assert pages_kept(self.harness)
            assert set(self.harness.finish) | set(self.harness.errors) == set(self.prompts)
            if self.roomy and not self.flushed and not self.harness.errors:
                self._finds_what_was_put_in()
        self.folder.cleanup()

    def _finds_what_was_put_in(self) -> None:
        """Nothing was ever evicted: a prompt that was computed whole is found whole."""
        whole = [n for n, f in self.harness.finish.items() if f is not Finish.ABORT]
        for number in whole[:3]:
            salt, prompt = self.prompts[number]
            self._add([*prompt, 9], 1, False, salt, 0)
            for _ in range(200):
                self.harness.turn()
                if self.number in self.harness.finish:
                    break
            page = self.harness.cache.page_size
            assert self.harness.cached[self.number] >= len(prompt) // page * page


def common(one: list[int], other: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            database=None,
        ),
    )


def test_random_life_is_sound() -> None:
    run(examples=60, steps=40)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_life_is_sound_at_length() -> None:
    """At least 5,000 rules."""
    run(examples=600, steps=60)
