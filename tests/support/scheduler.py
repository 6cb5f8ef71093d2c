"""A scheduler inside the test process: fake inbox and outlets, any device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engine.config import EngineConfig
from engine.ipc.board import Board, Heartbeat
from engine.ipc.messages import (
    Finish,
    RowReader,
    Stamps,
    StepOutput,
    Stop,
    TokenizedRequest,
    pack_i32,
    unpack_i32,
)
from engine.model_files.types import ModelFiles
from engine.sampling import SamplingParams
from scheduler_proc.build import build
from scheduler_proc.cache.groups import CacheGroup
from scheduler_proc.cache.kv_cache import KvCache
from scheduler_proc.cache.radix_tree import RadixTree
from scheduler_proc.options import PlannerOptions
from scheduler_proc.plan import Device
from scheduler_proc.planner import Planner
from scheduler_proc.process import Scheduler
from scheduler_proc.slots import Slots
from scheduler_proc.worker.null import NullDevice
from scheduler_proc.workload import GenerateWorkload

VOCAB = 1000
FULL = CacheGroup("full", "full")


class ListInbox:
    """Messages a test puts in."""

    def __init__(self) -> None:
        self.messages: list = []

    def drain(self, limit: int = 4096) -> Iterator:
        messages, self.messages = self.messages, []
        yield from messages

    def wait(self, timeout_s: float) -> bool:
        return bool(self.messages)


class Outlet:
    """Keeps what was sent."""

    def __init__(self) -> None:
        self.messages: list = []

    def send(self, message: object) -> None:
        self.messages.append(message)


class Harness:
    """A scheduler and the answers it gave, by request number."""

    def __init__(
        self,
        tmp_path: Path,
        *,
        device: Device | None = None,
        num_slots: int = 8,
        max_len: int = 256,
        page_size: int = 16,
        num_pages: int = 64,
        step_tokens: int = 64,
        depth: int = 0,
        eos_ids: tuple[int, ...] = (2,),
        vocab_size: int = VOCAB,
        confirm_holds: bool = True,
        groups: tuple[CacheGroup, ...] = (FULL,),
        group_pages: tuple[int, ...] | None = None,
        radix: bool = True,
        max_queued: int | None = None,
        **planner: object,
    ) -> None:
        self.device = device or NullDevice(vocab_size)
        pages = group_pages or (num_pages,) * len(groups)
        self.cache = KvCache(
            groups,
            pages,
            page_size,
            num_slots,
            min(max_len, num_pages * page_size),
            (lambda on_evict: RadixTree(groups, page_size, on_evict=on_evict)) if radix else None,
            self.device.pages_freed,
        )
        self.slots = Slots(num_slots, min(max_len, num_pages * page_size), len(eos_ids))
        options = PlannerOptions(step_tokens=step_tokens, **planner)  # type: ignore[arg-type]
        self.planner = Planner(self.slots, self.cache, eos_ids, options)
        self.workload = GenerateWorkload(
            self.slots,
            self.cache,
            self.planner,
            vocab_size=vocab_size,
            context_length=max_len,
            max_queued=max_queued,
        )
        self._wire(tmp_path, depth, confirm_holds)

    @classmethod
    def of_model(cls, tmp_path: Path, config: EngineConfig, model: ModelFiles) -> Harness:
        """A scheduler put together as the process does it, with a real model."""
        self = cls.__new__(cls)
        self.workload, self.device = build(config, model)
        self.cache, self.slots, self.planner = self.workload.cache, self.workload.slots, self.workload.planner
        self._wire(tmp_path, config.overlap_depth, True)
        return self

    def _wire(self, tmp_path: Path, depth: int, confirm_holds: bool) -> None:
        board = Board(tmp_path / f"board-{time.monotonic_ns()}", 4, create=True)
        self.inbox, self.outlet, self.front = ListInbox(), Outlet(), Outlet()
        self.scheduler = Scheduler(
            self.workload, self.device, self.inbox, self.outlet, [self.front], Heartbeat(board, 1), depth
        )
        self.confirm_holds = confirm_holds
        self.tokens: dict[int, list[int]] = {}
        self.finish: dict[int, Finish] = {}
        self.errors: dict[int, object] = {}
        self.cached: dict[int, int] = {}
        self.stopped: set[int] = set()
        """Requests whose text has ended for the detokenizer: it drops what else comes."""
        self._read = 0
        self._rows = RowReader()

    def add(
        self,
        number: int,
        prompt: list[int] | int,
        *,
        attempt: int = 0,
        output: tuple[int, ...] = (),
        salt: str | None = None,
        priority: int = 0,
        **sampling: object,
    ) -> None:
        ids = list(range(3, 3 + prompt)) if isinstance(prompt, int) else prompt
        params = SamplingParams(**{"temperature": 0.0, "seed": 1, "ignore_eos": True, **sampling})
        self.inbox.messages.append(
            TokenizedRequest(
                number,
                attempt,
                0,
                f"r{number}",
                pack_i32(ids),
                params,
                True,
                pack_i32(output),
                Stamps(),
                salt,
                priority,
            )
        )

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.turn()
            self._take_in()

    def run(self, limit: int = 10_000) -> int:
        """Turn until nothing is left; returns the number of turns."""
        for turns in range(limit):
            if self.scheduler.idle and not self.inbox.messages:
                assert self.workload.audit() == []
                tree = self.cache.tree
                assert tree is None or tree.num_live_locks == tree.num_pins
                return turns
            self.turn()
        raise AssertionError(f"not idle after {limit} turns")

    def _take_in(self) -> None:
        for output in self.outlet.messages[self._read :]:
            assert isinstance(output, StepOutput)
            batch = output.tokens
            start = 0
            ids = unpack_i32(batch.tokens)
            for number, attempt, first, count, finish, held in self._rows.rows(batch):
                # As in the detokenizer: after the end of a text, held ends included, an abort is old news.
                if number in self.stopped or (number in self.finish and finish == Finish.ABORT):
                    start += count
                    continue
                got = self.tokens.setdefault(number, [])
                assert number not in self.finish, "output after the end"
                assert first <= len(got) or attempt > 0
                got[first:] = ids[start : start + count].tolist()
                start += count
                if finish:
                    self.finish[number] = Finish(finish)
                    if held and self.confirm_holds:
                        self.inbox.messages.append(Stop(number, attempt, len(got)))
            self.cached.update({started.request: started.cached_tokens for started in output.started})
            for failed in output.failed:
                self.errors[failed.request] = failed.error
        self._read = len(self.outlet.messages)


def expected_null_tokens(prompt_len: int, count: int, vocab_size: int = VOCAB) -> list[int]:
    """What NullDevice gives after a prompt of this length."""
    return [int(token) for token in (np.arange(prompt_len, prompt_len + count) * 31) % vocab_size]


def pages_kept(harness: Harness) -> bool:
    """Nothing runs, and every page is free or in the tree."""
    tree = harness.cache.tree
    return all(
        pool.num_free + (0 if tree is None else tree.num_pages(group)) == pool.num_pages
        for group, pool in enumerate(harness.cache.pools)
    )
