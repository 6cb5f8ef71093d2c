"""Plans on their way from rank 0 to the others."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from scheduler_proc.plan import StepPlan


def decode_plan(data: bytes) -> StepPlan:
    """What `scheduler_proc.record.encode_plan` made bytes of. Raises msgspec.MsgspecError if it did not."""
    return _DECODER.decode(data)


def followers_plan(plan: StepPlan) -> StepPlan:
    """The part of a plan that a follower runs: the same collectives, without what is for rank 0 alone.

    Every rank draws, and rank 0's draw counts; so what changes logits and who wants logprobs is not told. Prompt scores
    stay, for their logits are made by all, and so does adjusts_logits, by which a step is drawn in a graph or not.
    """
    joins = plan.joins
    if joins is not None and joins.adjustments:
        joins = msgspec.structs.replace(joins, adjustments=())
    return msgspec.structs.replace(plan, joins=joins, logprobs=None)


def _array(kind: type, value: Any) -> np.ndarray:
    if kind is not np.ndarray:
        raise TypeError(f"a plan holds no {kind}")
    dtype, shape, data = value
    # A copy, so that it can be written to, as a planner's own arrays can.
    return np.frombuffer(data, dtype).reshape(shape).copy()


_DECODER = msgspec.msgpack.Decoder(StepPlan, dec_hook=_array)
