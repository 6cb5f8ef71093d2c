"""Decode and prefill steps of a model on the CPU, in this process: no HTTP, no planner, no detokenizer.

PYTHONPATH=. python tools/bench_steps.py --batch 1 8 32 --context 64 2048 8000 [--kv-cache-dtype int8]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

import numpy as np

from engine.config import EngineConfig, ModelOptions, ProcessOptions, SchedulerOptions
from engine.model_files.resolve import resolve
from scheduler_proc.build import build
from scheduler_proc.plan import Device, Joins, PageUpdates, StepPlan


@dataclass
class Steps:
    """Makes plans for a device as a scheduler would, greedy and without a prefix cache."""

    device: Device
    page_size: int
    vocab_size: int
    chunk: int
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    made: int = 0

    def prefill(self, slot: int, length: int, room: int) -> float:
        """A new occupant of `slot` with a random prompt and room for more; returns the seconds it took."""
        num_pages = -(-(length + room) // self.page_size)
        pages = np.arange(slot * num_pages, (slot + 1) * num_pages, dtype=np.int32)
        updates = PageUpdates(np.full(num_pages, slot, np.int32), np.arange(num_pages, dtype=np.int32), pages)
        taken = 0.0
        for begin in range(0, length, self.chunk):
            tokens = self.rng.integers(3, self.vocab_size, min(self.chunk, length - begin)).astype(np.int32)
            first = begin == 0
            plan = self._plan([slot], 0, [len(tokens)], [begin + len(tokens)], tokens)
            plan.joins = _greedy(slot) if first else None
            plan.pages = (updates if first else None,)
            taken += self._run(plan)
        return taken

    def decode(self, batch: int, length: int) -> float:
        """One token for slots 0 to batch - 1, which hold `length` tokens; returns the seconds it took."""
        plan = self._plan(list(range(batch)), batch, [1] * batch, [length + 1] * batch, np.zeros(0, np.int32))
        plan.rows_version = -2 - batch
        return self._run(plan)

    def _run(self, plan: StepPlan) -> float:
        begin = time.perf_counter()
        self.device.collect(self.device.launch(plan))
        return time.perf_counter() - begin

    def _plan(
        self, rows: list[int], num_decode: int, q_lens: list[int], kv_lens: list[int], tokens: np.ndarray
    ) -> StepPlan:
        self.made += 1
        return StepPlan(
            step=self.made,
            rows=np.array(rows, np.int32),
            num_decode=num_decode,
            q_lens=np.array(q_lens, np.int32),
            kv_lens=np.array(kv_lens, np.int32),
            tokens=tokens,
            sample=np.ones(len(rows), bool),
            all_greedy=True,
            needs_filter=False,
            rows_version=self.made,
            slots_version=-1,
            joins=None,
            pages=(None,),
        )


def _greedy(slot: int) -> Joins:
    one = np.ones(1, np.float32)
    return Joins(
        slots=np.array([slot], np.int32),
        context_lens=np.zeros(1, np.int32),
        temperature=0 * one,
        top_p=one,
        top_k=np.array([-1], np.int32),
        min_p=0 * one,
        seeds=np.zeros(1, np.int64),
        stop_ids=np.zeros((1, 0), np.int32),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--cpu-threads", type=int)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    options = parser.parse_args()

    model = resolve(options.model)
    room = options.steps + 1
    page_size = EngineConfig().page_size
    tokens = max(options.batch) * (max(options.context) + room + page_size)
    config = EngineConfig(
        model=ModelOptions(model=options.model, dtype=options.dtype, kv_cache_dtype=options.kv_cache_dtype),
        scheduler=SchedulerOptions(max_total_tokens=tokens, max_running_requests=max(options.batch)),
        process=ProcessOptions(cpu_threads=options.cpu_threads),
    )
    _, device = build(config, model)
    steps = Steps(device, page_size, model.config.vocab_size, config.chunked_prefill_size)
    print("batch  context  ms/step (min)    tok/s  prefill tok/s")
    for batch in options.batch:
        for context in options.context:
            seconds = sum(steps.prefill(slot, context, room) for slot in range(batch))
            times = sorted(steps.decode(batch, context + i) for i in range(options.steps))
            median = statistics.median(times)
            print(
                f"{batch:5}  {context:7}  {median * 1e3:7.2f} ({times[0] * 1e3:.2f})  {batch / median:7.0f}"
                f"  {batch * context / seconds:13.0f}",
                flush=True,
            )
    device.close()


if __name__ == "__main__":
    main()
