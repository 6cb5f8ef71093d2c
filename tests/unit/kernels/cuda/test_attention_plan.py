"""How steps are cut into tiles: every token once, lists only where needed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import AttentionBatch, SharedPrefix
from kernels.cuda.attention import PagedAttention
from kernels.cuda.attention_kernel import REST, SHARED, WHOLE
from kernels.cuda.attention_plan import DECODE, DRAFT, PREFILL, Launch, fixed_lanes, make_plan, tile_lanes
from kernels.cuda.context import make_context
from kernels.cuda.tuning import Tuner

LANES = tile_lanes(4, False)


def _batch(q_lens: list[int], prefix: SharedPrefix | None = None) -> AttentionBatch:
    lens = torch.tensor([q_len + 100 for q_len in q_lens])
    table = torch.zeros(len(q_lens), 100, dtype=torch.int32)
    return AttentionBatch(np.array(q_lens, dtype=np.int32), lens, 1600, table, 16, None, prefix)


def _tokens(launch: Launch, group: int) -> list[tuple[int, int]]:
    """(row, token of the batch) of everything in a launch with a list."""
    assert launch.tiles is not None
    found = []
    for row, first, origin, q_len, *_ in launch.tiles.tolist():
        last = min(first + launch.lanes // group, q_len)
        found += [(row, origin + token) for token in range(first, last)]
    return found


@pytest.mark.parametrize(
    ("q_lens", "kind", "tiles"),
    [([1] * 9, DECODE, 9), ([4] * 3, DECODE, 3), ([5] * 3, DRAFT, 3), ([16], DRAFT, 1), ([100] * 2, PREFILL, 8)],
)
def test_rows_of_one_length_need_no_list(q_lens: list[int], kind: int, tiles: int) -> None:
    plan = make_plan(_batch(q_lens), 4, LANES, None)
    assert plan is not None and not plan.has_lists and not plan.shares
    (launch,) = plan.launches
    assert (launch.kind, launch.part, launch.num_tiles, launch.q_len) == (kind, WHOLE, tiles, q_lens[0])
    assert launch.tiles is None and launch.max_keys == 1600


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("is_float32", [False, True])
def test_mixed_rows(group: int, is_float32: bool) -> None:
    q_lens = [1, 0, 7, 300, 1, 16, 33]
    plan = make_plan(_batch(q_lens), group, tile_lanes(group, is_float32), None)
    assert plan is not None and plan.has_lists
    assert [launch.kind for launch in plan.launches] == sorted({launch.kind for launch in plan.launches})[::-1]
    found = sorted(token for launch in plan.launches for token in _tokens(launch, group))
    rows = np.repeat(np.arange(len(q_lens)), q_lens).tolist()
    assert found == list(zip(rows, range(sum(q_lens)), strict=True))
    assert all(launch.part == WHOLE and launch.num_tiles == len(launch.tiles) for launch in plan.launches)


@pytest.mark.parametrize(("group", "is_float32", "lanes"), [(4, False, 64), (4, True, 32), (96, False, 128)])
def test_one_kind_for_all_rows(group: int, is_float32: bool, lanes: int) -> None:
    for q_lens in ([1, 0, 7, 300, 1, 16, 33], [1, 1], [500]):
        plan = make_plan(_batch(q_lens), group, fixed_lanes(group, is_float32), None)
        assert plan is not None
        (launch,) = plan.launches
        tokens = lanes // group
        assert launch.lanes == lanes and launch.num_tiles == sum(-(-q_len // tokens) for q_len in q_lens)


def test_no_tokens() -> None:
    assert make_plan(_batch([0, 0]), 4, LANES, None) is None


def test_shared_keys() -> None:
    prefix = SharedPrefix(np.array([0, 3, 4, 6, 8], dtype=np.int32), np.array([64, 32, 0, 16], dtype=np.int32))
    # The last group has one row that takes part.
    plan = make_plan(_batch([1, 1, 40, 1, 1, 1, 0, 2], prefix), 4, LANES, 128)
    assert plan is not None and plan.shares
    shared = [launch for launch in plan.launches if launch.part == SHARED]
    rest = [launch for launch in plan.launches if launch.part == REST]
    assert [launch.kind for launch in shared] == [PREFILL] and [launch.kind for launch in rest] == [PREFILL, DECODE]
    assert shared[0].tiles is not None and shared[0].max_keys == 64
    assert shared[0].tiles[:, :5].tolist() == [[0, 0, 0, 42, 64], [0, 32, 0, 42, 64]]
    borders = {row: border for launch in rest for row, _, _, _, border, *_ in launch.tiles.tolist()}
    assert borders == {0: 64, 1: 64, 2: 64, 3: 0, 4: 0, 5: 0, 7: 0}
    assert sorted(token for launch in rest for _, token in _tokens(launch, 4)) == list(range(47))


def test_little_shared_is_left() -> None:
    prefix = SharedPrefix(np.array([0, 3], dtype=np.int32), np.array([64], dtype=np.int32))
    batch = _batch([1, 1, 1], prefix)
    for least, shares in ((128, True), (129, False), (None, False)):
        plan = make_plan(batch, 4, LANES, least)
        assert plan is not None and plan.shares == shares


@pytest.mark.parametrize(("shared_bytes", "first"), [(99 * 1024, "frugal"), (227 * 1024, "even")])
def test_what_does_not_fit_a_device_is_not_the_default(shared_bytes: int, first: str, device: torch.device) -> None:
    attention = PagedAttention(make_context(device, Tuner(device, None)))
    attention._shared_bytes = shared_bytes
    for kind in (DRAFT, PREFILL):
        launch = Launch(kind, 64, WHOLE, 1, 8, 8, None)
        assert next(iter(attention._candidates(launch, 256, 2)[1])) == first
        assert next(iter(attention._candidates(launch, 128, 2)[1])) == "even"
