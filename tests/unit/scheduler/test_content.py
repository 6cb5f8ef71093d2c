"""Random lives of a scheduler on a device whose tokens depend on every KV entry: what comes out is what was asked for.

Every request's tokens are compared with a direct computation, every page's owners are recounted, and what KV events
told is compared with the tree, again and again.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

from engine.ipc.messages import Abort, Finish, FlushCall, PinTokens, Reply, Stop, UnpinCall, pack_i32
from engine.sampling import SamplingParams
from scheduler_proc.cache.events import EventBus
from scheduler_proc.cache.eviction import Policy
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.cache.radix_tree import RadixTree
from scheduler_proc.options import PlannerOptions
from scheduler_proc.planner import Planner
from scheduler_proc.slots import Slots
from scheduler_proc.workload import GenerateWorkload
from tests.support.content_device import ContentDevice, expected_tokens
from tests.support.kv_mirror import KvMirror, blocks_of
from tests.support.scheduler import FULL, VOCAB, Harness, pages_kept

MAX_LEN = 80
NUM_SLOTS = 5
POLICIES = ("fcfs", "lpm", "lof", "dfs-weight", "random", "priority")
EVICTION: tuple[Policy, ...] = ("lru", "lfu", "fifo", "priority")
SALTS = (None, None, "a")


def harness_on(
    folder: Path,
    device: ContentDevice,
    groups: tuple[CacheGroup, ...],
    num_pages: int,
    page_size: int,
    depth: int,
    tree: RadixTree | None,
    options: PlannerOptions,
) -> Harness:
    """A harness around a tree of one's own."""
    self = Harness.__new__(Harness)
    self.device = device
    pages = (num_pages,) * len(groups)

    def take_over(on_evict) -> RadixTree:
        assert tree is not None
        tree._on_evict = on_evict
        return tree

    make_tree = None if tree is None else take_over
    self.cache = KvCache(groups, pages, page_size, NUM_SLOTS, MAX_LEN, make_tree, device.pages_freed)
    self.slots = Slots(NUM_SLOTS, MAX_LEN, 0)
    self.planner = Planner(self.slots, self.cache, (), options)
    self.workload = GenerateWorkload(self.slots, self.cache, self.planner, vocab_size=VOCAB, context_length=MAX_LEN)
    self._wire(folder, depth, True)
    return self


class Life:
    """One scheduler, drawn from a seed, and all that happens to it."""

    def __init__(self, folder: Path, seed: int, *, faults: bool) -> None:
        self.draw = draw = random.Random(seed)
        self.faults = faults
        page_size = draw.choice([1, 4])
        num_pages = draw.choice([20, 24, 40, 200]) * 4 // page_size
        groups = (FULL, CacheGroup("window", "window", draw.choice([3, 12]))) if draw.random() < 0.5 else (FULL,)
        pages = (num_pages,) * len(groups)
        self.device = ContentDevice(groups, pages, page_size, NUM_SLOTS, MAX_LEN, eager=draw.random() < 0.3)
        self.now_s = 0.0
        bus = EventBus()
        self.mirror = KvMirror(bus)
        self.tree = None
        if draw.random() < 0.85:
            self.tree = RadixTree(
                groups,
                page_size,
                policy=draw.choice(EVICTION),
                on_evict=lambda group, pages, busy_until: None,
                clock=lambda: self.now_s,
                bus=bus,
                max_pinned_pages=[num_pages // 2] * len(groups),
            )
        options = PlannerOptions(
            step_tokens=draw.choice([3, 16, 200]),
            max_step_gap=draw.choice([2, 4]),
            policy=POLICIES[seed % len(POLICIES)],
            conservativeness=draw.choice([0.1, 0.3]),
            seed=seed,
            most_common_rows=draw.choice([0, NUM_SLOTS]),
            least_common=1,
        )
        self.harness = harness_on(
            folder, self.device, groups, num_pages, page_size, draw.choice([0, 1, 2]), self.tree, options
        )

        def owner_of(slot: int) -> int:
            occupant = self.harness.slots.occupant[slot]
            assert occupant is not None, "a plan has a row without an occupant"
            return SALTS.index(self.salts[occupant.request])

        self.device.watch(self.harness.cache, owner_of)
        self.prompts: dict[int, list[int]] = {}
        self.salts: dict[int, str | None] = {}
        self.sampling: dict[int, SamplingParams] = {}
        self.aborted: set[int] = set()
        self.pins: list[int] = []
        self.num_pins = 0
        self._expected: dict[int, list[int]] = {}
        self._num_replies = 0

    # -- what happens ---------------------------------------------------------------------------------------------

    def act(self) -> None:
        draw, inbox, harness = self.draw, self.harness.inbox.messages, self.harness
        kind = draw.random()
        if kind < 0.3:
            self.ask()
        elif kind < 0.68:
            self.turn(draw.randint(1, 5))
        elif kind < 0.75 and self.prompts:
            number = draw.choice(list(self.prompts))
            self.aborted.add(number)
            inbox.append(Abort(number, 0))
        elif kind < 0.82:
            self.end_text()
        elif kind < 0.85:
            inbox.append(FlushCall(0, 1))
        elif kind < 0.91 and self.prompts:
            number = draw.choice(list(self.prompts))
            ttl_s = draw.choice([3.0, 1e6])
            inbox.append(PinTokens(0, 1, pack_i32(self.known(number)), ttl_s, self.salts[number]))
        elif kind < 0.94 and self.pins:
            inbox.append(UnpinCall(0, 1, self.pins.pop(draw.randrange(len(self.pins)))))
        elif self.faults:
            fault = draw.randrange(5)
            if fault == 4:
                self.device.nan_next = draw.randrange(NUM_SLOTS)
            elif fault == 3:
                self.device.nan_next = -1
            elif fault == 2:
                self.device.refuses_next = True
            else:
                self.device.loses_next = ("before", "after")[fault]
        assert len(harness.front.messages) >= self._num_replies

    def ask(self) -> None:
        draw = self.draw
        number = len(self.prompts) + 1
        salt = draw.choice(SALTS)
        if self.prompts and draw.random() < 0.4:
            # Goes on from what another one has said, or from amid it.
            other = draw.choice(list(self.prompts))
            salt = self.salts[other] if draw.random() < 0.8 else salt
            known = self.known(other)
            prompt = [*known[: max(1, min(len(known) - draw.choice([0, 0, 1, 5]), 54))], draw.randint(6, 8)]
        else:
            trunk = draw.choices([3, 4], k=draw.randint(0, 4))
            prompt = [token for token in trunk for _ in range(8)] + draw.choices([3, 4, 5], k=draw.randint(1, 6))
        stops = draw.random()
        most = MAX_LEN - len(prompt) if draw.random() < 0.3 else 24
        sampling: dict[str, object] = {"max_tokens": draw.randint(0, most)}
        if stops < 0.3:
            sampling["stop"] = ("x",)
        elif stops < 0.5:
            later = expected_tokens(prompt, 20)
            sampling["stop_token_ids"] = (later[draw.randrange(20)], draw.choice([5, 6]))
        self.add(number, prompt, salt, draw.choice([0, 0, 50]), **sampling)

    def add(self, number: int, prompt: list[int], salt: str | None, priority: int = 0, **sampling: object) -> None:
        self.prompts[number], self.salts[number] = prompt, salt
        self.harness.add(number, prompt, salt=salt, priority=priority, **sampling)
        self.sampling[number] = self.harness.inbox.messages[-1].sampling

    def known(self, number: int) -> list[int]:
        return self.prompts[number] + self.harness.tokens.get(number, [])

    def end_text(self) -> None:
        """The detokenizer finds an end, maybe some tokens ago."""
        harness = self.harness
        running = [n for n in sorted(harness.workload.requests) if harness.tokens.get(n) and n not in harness.finish]
        if running:
            number = self.draw.choice(running)
            count = len(harness.tokens[number])
            harness.finish[number] = Finish.STOP_STRING
            harness.stopped.add(number)
            harness.inbox.messages.append(Stop(number, 0, self.draw.randint(max(1, count - 2), count)))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.now_s += 1.0
            self.harness.turn()
            for reply in self.harness.front.messages[self._num_replies :]:
                assert isinstance(reply, Reply)
                if "pin" in reply.values:
                    self.pins.append(reply.values["pin"])
                    self.num_pins += 1
            self._num_replies = len(self.harness.front.messages)
        self.look()

    # -- what must hold -------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Tokens, pages and events so far."""
        for number, tokens in self.harness.tokens.items():
            expected = self._expected.get(number, [])
            if len(expected) < len(tokens):
                expected = self._expected[number] = expected_tokens(self.prompts[number], len(tokens) + 4)
            assert tokens == expected[: len(tokens)], f"request {number}"
        assert self.harness.workload.audit() == []
        assert self.mirror.problems == []
        if self.tree is not None:
            assert self.mirror.blocks == blocks_of(self.tree)

    def rest(self) -> None:
        for _ in range(3000):
            if self.harness.scheduler.idle and not self.harness.inbox.messages:
                return
            self.turn()
        raise AssertionError("the scheduler does not come to rest")

    def look_at_ends(self) -> None:
        """Every request has ended, as it should and where it should."""
        harness = self.harness
        assert set(harness.finish) | set(harness.errors) == set(self.prompts)
        assert self.faults or not harness.errors
        for number, finish in harness.finish.items():
            tokens, sampling = harness.tokens.get(number, []), self.sampling[number]
            stopped = [token in sampling.stop_token_ids for token in tokens]
            assert not any(stopped[:-1])
            if finish is Finish.STOP_TOKEN:
                assert stopped[-1]
            elif finish is Finish.LENGTH:
                assert len(tokens) == sampling.max_tokens and not any(stopped)
            elif finish is Finish.ABORT:
                assert number in self.aborted

    def ask_again(self) -> None:
        """Without faults every prompt is answered from what is cached; where that is NaN, only once is it not."""
        self.device.nan_next = self.device.loses_next = None
        self.device.refuses_next = False
        self.now_s += 1e7
        broken = [number for number, error in self.harness.errors.items() if getattr(error, "code", None) == "nan"]
        for number in dict.fromkeys([*list(self.prompts)[-6:], *broken]):
            for chance in range(2):
                again = len(self.prompts) + 1
                self.add(again, self.prompts[number], self.salts[number], max_tokens=3)
                self.rest()
                if again in self.harness.finish:
                    assert self.harness.finish[again] is Finish.LENGTH
                    assert len(self.harness.tokens[again]) == 3
                    break
                assert chance == 0 and getattr(self.harness.errors[again], "code", None) == "nan"


def live(seed: int, *, faults: bool) -> Life:
    with tempfile.TemporaryDirectory() as folder:
        life = Life(Path(folder), seed, faults=faults)
        for _ in range(life.draw.randint(30, 90)):
            life.act()
        life.rest()
        life.look_at_ends()
        life.ask_again()
        assert pages_kept(life.harness)
        return life


def test_random_lives_give_what_was_asked_for() -> None:
    lives = [live(seed, faults=seed % 2 == 1) for seed in range(24)]
    happened = {
        "answers": sum(len(life.harness.finish) for life in lives),
        "cached": sum(bool(cached) for life in lives for cached in life.harness.cached.values()),
        "retractions": sum(life.harness.planner.num_retractions for life in lives),
        "pins": sum(life.num_pins for life in lives),
        "errors": sum(len(life.harness.errors) for life in lives),
        "nan": sum(life.device.num_nan_rows for life in lives),
        "in common": sum(life.device.num_common_steps for life in lives),
        "stopped": sum(finish is Finish.STOP_TOKEN for life in lives for finish in life.harness.finish.values()),
    }
    assert all(num >= 5 for num in happened.values()), happened


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_random_lives_give_what_was_asked_for() -> None:
    for seed in range(1000, 1300):
        try:
            live(seed, faults=seed % 2 == 1)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


@pytest.mark.parametrize("eager", [False, True])
def test_the_device_sees_what_is_wrong(tmp_path: Path, eager: bool) -> None:
    """Freed, foreign or changed entries, and those of another place, all change the next token."""

    def next_token(change) -> int:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        device = ContentDevice((FULL,), (16,), 4, NUM_SLOTS, MAX_LEN, eager=eager)
        harness = harness_on(folder, device, (FULL,), 16, 4, 0, None, PlannerOptions(step_tokens=64))
        device.watch(harness.cache, lambda slot: 0)
        harness.add(1, [5, 6, 7, 8, 9, 5, 6, 7, 8, 8], max_tokens=3)
        harness.turn()
        change(device._memories[0], harness.cache.tables[0].pages[int(harness.slots.used()[0])])
        harness.run()
        assert harness.tokens[1][0] == expected_tokens([5, 6, 7, 8, 9, 5, 6, 7, 8, 8], 1)[0]
        return harness.tokens[1][1]

    def swap(memory, pages: np.ndarray) -> None:
        memory.table[:, [0, 1]] = memory.table[:, [1, 0]]

    def other_owner(memory, pages: np.ndarray) -> None:
        memory.owners[pages[1], 2] = 7

    def other_token(memory, pages: np.ndarray) -> None:
        memory.tokens[pages[0], 0] = 9

    right = next_token(lambda memory, pages: None)
    assert right == expected_tokens([5, 6, 7, 8, 9, 5, 6, 7, 8, 8], 2)[1]
    wrong = [
        next_token(lambda memory, pages: memory.free(pages[:1])),
        *map(next_token, (swap, other_owner, other_token)),
    ]
    assert right not in wrong
