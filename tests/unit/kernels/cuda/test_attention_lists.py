"""Attention whose rows are read on the device, for graphs: the same as with rows that the host knows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention import AttentionSpec, CommonPrefix, paged_attention
from kernels.cuda.attention import PagedAttention
from kernels.cuda.attention_lists import device_list
from kernels.cuda.context import make_context
from kernels.cuda.fixed_attention import FixedAttention
from kernels.cuda.tuning import Tuner
from tests.support.attention_cases import Case, make_case, plain_attention, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (log2|exp2):RuntimeWarning")

# The last row fills up a step: it has tokens, and no context.
STEPS = [
    [(1, 40), (1, 7), (2, 2), (20, 70), (9, 0)],
    [(33, 33), (0, 0)],
    [(1, 5), (1, 1), (1, 17), (5, 0)],
    [(6, 40), (1, 0), (40, 61), (3, 0)],
]


def on_device(case: Case) -> Case:
    """The same case, of which the host knows no more than how many rows and tokens there are."""
    q_lens = case.batch.q_lens
    starts = torch.from_numpy(np.concatenate(([0], np.cumsum(q_lens))).astype(np.int32)).to(case.q.device)
    bounds = np.zeros_like(q_lens)
    bounds[0] = q_lens.sum()
    return replace(case, batch=replace(case.batch, q_lens=bounds, q_starts=starts))


@pytest.mark.parametrize("rows", STEPS)
@pytest.mark.parametrize(
    ("heads", "window", "splits"), [((6, 2), None, None), ((6, 2), None, 3), ((4, 4), None, None), ((8, 1), 12, 3)]
)
def test_as_the_definition_says(
    rows: list[tuple[int, int]], heads: tuple[int, int], window: int | None, splits: int | None, device: torch.device
) -> None:
    case = make_case(rows, heads=heads, page_size=4, device=device)
    context = make_context(device, Tuner(device, None))
    spec = AttentionSpec(0.3, window)
    expected, _ = plain_attention(case, spec)
    out = PagedAttention(context, splits=splits)(case.q, case.kv, on_device(case).batch, spec)
    assert relative_error(out, expected) < 2e-6
    assert not context.tickets.any()
    fixed = FixedAttention(context)
    assert torch.equal(fixed(case.q, case.kv, on_device(case).batch, spec), fixed(case.q, case.kv, case.batch, spec))


@pytest.mark.parametrize("rows", STEPS)
def test_the_reference_takes_them_too(rows: list[tuple[int, int]]) -> None:
    case = make_case(rows, page_size=4)
    spec = AttentionSpec(0.3)
    expected, _ = plain_attention(case, spec)
    assert relative_error(paged_attention(case.q, case.kv, on_device(case).batch, spec), expected) < 2e-6


@pytest.mark.parametrize("lens", [[3, 0, 1, 7, 8, 2], [0], [17, 1], [1] * 30 + [0]])
@pytest.mark.parametrize(("least", "most"), [(1, 2), (3, 1 << 20), (1, 1 << 20)])
def test_a_list_holds_every_tile_of_the_wanted_rows(
    lens: list[int], least: int, most: int, device: torch.device
) -> None:
    tokens, capacity = 4, 300
    starts = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
    tiles = device_list(torch.from_numpy(starts).to(device), least, most, tokens, capacity).cpu().numpy()
    wanted = [
        [row, first, start, length, 0]
        for row, (length, start) in enumerate(zip(lens, starts.tolist(), strict=False))
        if least <= length <= most
        for first in range(0, length, tokens)
    ]
    assert sorted(tiles[: len(wanted), :5].tolist()) == wanted
    assert np.array_equal(tiles[len(wanted) :, :5], [[len(lens) - 1, 0, 0, 0, 0]] * (capacity - len(wanted)))


def with_common(case: Case, lens: list[int]) -> Case:
    """The same case, of which the device alone knows who has the first row's first keys."""
    table = case.batch.page_table[:1, : max(lens) // case.batch.page_size + 1].to(torch.int32)
    common = CommonPrefix(table, torch.tensor(lens, dtype=torch.int32, device=case.q.device))
    return replace(case, batch=replace(case.batch, prefix=None, common=common))


# Not everybody needs to be told of, and a row that has ended has no context.
@pytest.mark.parametrize("lens", [[32, 32, 0, 32, 0, 32], [0] * 6])
@pytest.mark.parametrize(("heads", "splits"), [((6, 2), None), ((6, 2), 3), ((8, 1), 2)])
def test_rows_that_have_a_prefix_in_common(
    lens: list[int], heads: tuple[int, int], splits: int | None, device: torch.device
) -> None:
    rows = [(1, 40), (1, 33), (1, 50), (1, 36), (1, 20), (1, 0)]
    case = make_case(rows, heads=heads, prefix=[(4, 32), (1, 0), (1, 0)], device=device)
    context = make_context(device, Tuner(device, None))
    spec = AttentionSpec(0.3, sinks=torch.linspace(-1.0, 3.0, heads[0], device=device))
    expected, _ = plain_attention(case, spec)
    found = with_common(case, lens)
    out = PagedAttention(context, splits=splits)(case.q, case.kv, found.batch, spec)
    assert relative_error(out[:5], expected[:5]) < 2e-6 and out.isfinite().all()
    assert not context.tickets.any()
    alone = replace(case.batch, prefix=None)
    for attention in (paged_attention, FixedAttention(context)):
        assert torch.equal(attention(case.q, case.kv, found.batch, spec), attention(case.q, case.kv, alone, spec))


def test_windows_leave_nothing_in_common(device: torch.device) -> None:
    case = make_case([(1, 40), (1, 50)], prefix=[(2, 32)], device=device)
    spec, attention = AttentionSpec(0.3, 12), PagedAttention(make_context(device, Tuner(device, None)))
    out = attention(case.q, case.kv, with_common(case, [32, 32]).batch, spec)
    assert torch.equal(out, attention(case.q, case.kv, replace(case.batch, prefix=None), spec))
