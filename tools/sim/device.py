"""A device without a model: tokens from a formula, time from the cost model, on the virtual clock."""

from __future__ import annotations

import numpy as np

from scheduler_proc.plan import Handle, StepPlan, StepResult
from tools.sim.clock import Clock
from tools.sim.cost import StepCost, load_of

VOCAB = 128_256
STOP_ID = 2
FIRST_TEXT_ID = 16
"""Ids below are never text, so a formula or a draw cannot end an answer by chance."""


def text_ids(number: np.ndarray | int, positions: np.ndarray) -> np.ndarray:
    """int32 [n]: what the device says at each position (tokens before it) of request `number`."""
    mixed = positions.astype(np.int64) * 31 + np.asarray(number, np.int64) * 7919
    return (FIRST_TEXT_ID + mixed % (VOCAB - FIRST_TEXT_ID)).astype(np.int32)


def answer_ids(number: int, prompt_len: int, count: int) -> np.ndarray:
    """int32 [count]: the answer to a request that ends by length; what a next turn finds in its history."""
    return text_ids(number, np.arange(prompt_len, prompt_len + count))


class SimHandle(Handle, eq=False):
    """A launched step that ends at `end_s` of virtual time."""

    end_s: float = 0.0


class SimDevice:
    """Steps run one after the other; launching takes `host_s`, collecting waits for the step's end.

    A join's seed is its request's number: a device is told of no other name. `stop_at[number]` is the length (prompt
    and answer before it) after which a request says STOP_ID; beyond every length for those that end by length.
    """

    def __init__(self, clock: Clock, cost: StepCost, num_slots: int, stop_at: np.ndarray, host_s: float = 0.0) -> None:
        self.busy_s = 0.0
        """Virtual time spent in steps."""
        self.prefilled = 0
        """Prompt tokens computed, those after a retraction included."""
        self._clock = clock
        self._cost = cost
        self._host_s = host_s
        self._busy_until_s = 0.0
        self._stop_at = stop_at
        self._number = np.zeros(num_slots, np.int64)

    def launch(self, plan: StepPlan) -> SimHandle:
        self._clock.spend(self._host_s)
        if plan.joins is not None:
            self._number[plan.joins.slots] = plan.joins.seeds
        load = load_of(plan)
        duration_s = self._cost.ms(load) / 1000
        self.busy_s += duration_s
        self.prefilled += load.prefill_tokens
        self._busy_until_s = max(self._clock.now_s, self._busy_until_s) + duration_s
        # Said at launch: by the time of collecting, a slot may have its next occupant.
        numbers = self._number[plan.rows]
        tokens = text_ids(numbers, plan.kv_lens)
        tokens[plan.kv_lens >= self._stop_at[numbers]] = STOP_ID
        return SimHandle(plan, result=StepResult(tokens[:, None], None, None), end_s=self._busy_until_s)

    def collect(self, handle: Handle) -> StepResult:
        assert isinstance(handle, SimHandle) and isinstance(handle.result, StepResult)
        self._clock.advance_to(handle.end_s)
        return handle.result

    def pages_freed(self, pages: np.ndarray) -> None:
        """There is no KV."""

    def close(self) -> None:
        """Nothing to let go of."""
