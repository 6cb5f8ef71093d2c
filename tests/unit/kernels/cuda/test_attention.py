"""Paged attention in Triton against the definition, over layouts, sizes, masks and ways to cut a context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, TreeMask
from kernels.cuda.attention import PagedAttention, _row_class
from kernels.cuda.context import Context, make_context
from kernels.cuda.tuning import Key, Tuner
from tests.support.attention_cases import LAYOUTS, Case, make_case, plain_attention, relative_error

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (log2|exp2):RuntimeWarning")

DECODE = [(1, 40), (1, 1), (1, 0), (1, 100)]
MIXED = [(1, 40), (5, 5), (0, 0), (1, 17), (3, 33), (20, 70)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


class _Default(Tuner):
    """Measures nothing."""

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        return default


@pytest.fixture
def context(device: torch.device) -> Context:
    return make_context(device, _Default(device, None))


def _check(
    case: Case, context: Context, spec: AttentionSpec, splits: int | None = None, wants_lse: bool = True
) -> Tensor:
    """Compare result and lse with the definition; all counters must be back at zero."""
    lse = torch.full(case.q.shape[:2], torch.nan, device=case.q.device) if wants_lse else None
    out = PagedAttention(context, splits=splits, min_saved=1)(case.q, case.kv, case.batch, spec, lse)
    expected, expected_lse = plain_attention(case, spec)
    assert out.dtype == case.q.dtype and out.is_contiguous()
    assert relative_error(out, expected) < TOLERANCE[case.q.dtype]
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert not context.tickets.any()
    return out


@pytest.mark.parametrize(("layout", "page_size"), list(zip(LAYOUTS, (1, 16, 7, 64), strict=True)))
@pytest.mark.parametrize("rows", [DECODE, MIXED])
def test_layouts_and_pages(
    rows: Sequence[tuple[int, int]], layout: str, page_size: int, device: torch.device, context: Context
) -> None:
    case = make_case(rows, layout=layout, page_size=page_size, device=device)
    _check(case, context, AttentionSpec(0.3))


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 64), ((4, 2), 80), ((3, 1), 96), ((8, 1), 32), ((16, 1), 16), ((32, 1), 16)]
)
def test_heads(heads: tuple[int, int], head_dim: int, device: torch.device, context: Context) -> None:
    _check(make_case([(1, 33), (4, 20)], heads=heads, head_dim=head_dim, device=device), context, AttentionSpec(0.2))


@pytest.mark.parametrize("splits", [2, 5])
def test_splits(splits: int, device: torch.device, context: Context) -> None:
    _check(make_case(DECODE, device=device), context, AttentionSpec(0.3), splits)


def test_without_lse(device: torch.device, context: Context) -> None:
    _check(make_case(DECODE, device=device), context, AttentionSpec(0.3), wants_lse=False)


@pytest.mark.parametrize("window", [1, 20, 1000])
def test_windows(window: int, device: torch.device, context: Context) -> None:
    """What is before the window of a row's first token is not read."""
    case = make_case(MIXED, page_size=1, device=device)
    for row, (q_len, kv_len) in enumerate(case.rows):
        unseen = case.batch.page_table[row, : max(kv_len - q_len - window + 1, 0)].long()
        case.kv[unseen] = torch.nan
    _check(case, context, AttentionSpec(0.3, window), splits=2)


def test_window_of_a_long_prompt(device: torch.device, context: Context) -> None:
    case = make_case([(70, 150)], heads=(2, 1), dtype=torch.float16, device=device)
    _check(case, context, AttentionSpec(0.3, 40))


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(0.3, softcap=1.5), AttentionSpec(0.3, sinks=torch.linspace(-3.0, 9.0, 6))],
    ids=["softcap", "sinks"],
)
@pytest.mark.parametrize("splits", [None, 2])
def test_scores(spec: AttentionSpec, splits: int | None, device: torch.device, context: Context) -> None:
    sinks = None if spec.sinks is None else spec.sinks.to(device)
    _check(make_case(DECODE[:3], device=device), context, replace(spec, sinks=sinks), splits)


@pytest.mark.parametrize(("window", "splits"), [(None, None), (6, None), (6, 3)])
def test_trees(window: int | None, splits: int | None, device: torch.device, context: Context) -> None:
    case = make_case([(5, 40), (3, 3), (0, 0), (7, 90), (1, 12)], tree=True, device=device)
    _check(case, context, AttentionSpec(0.3, window), splits)


def test_a_chain_longer_than_the_window(device: torch.device, context: Context) -> None:
    """Among a step's own tokens the tree alone decides, however far apart they are."""
    case = make_case([(40, 60)], heads=(4, 1), tree=True, device=device)
    assert case.batch.tree is not None
    chain = TreeMask(
        torch.ones_like(case.batch.tree.visible).tril(), torch.arange(40, dtype=torch.int32, device=device)
    )
    _check(replace(case, batch=replace(case.batch, tree=chain)), context, AttentionSpec(0.3, 2))


@pytest.mark.parametrize(("splits", "tree"), [(None, False), (None, True), (2, False)])
def test_shared_prefix(splits: int | None, tree: bool, device: torch.device, context: Context) -> None:
    rows = [(1, 40), (0, 33), (1, 37), (1, 20), (4, 70), (2, 66), (1, 0)]
    groups = [(3, 32), (1, 16), (2, 64), (1, 0)]
    case = make_case(rows, prefix=groups, tree=tree, device=device)
    sinks = torch.linspace(-1.0, 3.0, 6, device=device)
    _check(case, context, AttentionSpec(0.3, sinks=sinks, softcap=3.0), splits)


def test_prefix_that_is_not_worth_it(device: torch.device, context: Context) -> None:
    case = make_case([(1, 40), (1, 50)], prefix=[(2, 32)], device=device)
    out = PagedAttention(context)(case.q, case.kv, case.batch, AttentionSpec(0.3))
    alone = replace(case.batch, prefix=None)
    assert torch.equal(out, PagedAttention(context)(case.q, case.kv, alone, AttentionSpec(0.3)))


@pytest.mark.parametrize("window", [None, 30])
def test_everything_at_once(window: int | None, device: torch.device, context: Context) -> None:
    case = make_case(
        [(3, 70), (2, 75), (1, 9)],
        heads=(9, 3),
        head_dim=80,
        dtype=torch.float16,
        kv_dtype=torch.float8_e5m2,
        layout="heads_outside",
        tree=True,
        prefix=[(2, 64), (1, 0)],
        table_dtype=torch.int64,
        device=device,
    )
    sinks = torch.linspace(-1.0, 3.0, 9, device=device)
    _check(case, context, AttentionSpec(0.2, window, 5.0, sinks, k_scale=0.5, v_scale=3.0), splits=2)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e5m2),
        (torch.float32, torch.float16),
    ],
)
def test_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, device: torch.device, context: Context) -> None:
    case = make_case(DECODE, dtype=dtype, kv_dtype=kv_dtype, device=device)
    _check(case, context, AttentionSpec(0.3, k_scale=0.5, v_scale=2.0), splits=2)


@pytest.mark.parametrize("rows", [[(10, 60)] * 2, [(70, 200), (1, 30)]], ids=["drafts", "prompt"])
@pytest.mark.parametrize("splits", [None, 2])
def test_larger_tiles(
    rows: Sequence[tuple[int, int]], splits: int | None, device: torch.device, context: Context
) -> None:
    case = make_case(rows, heads=(4, 1), dtype=torch.float16, device=device)
    _check(case, context, AttentionSpec(0.3), splits)


def test_fused_and_transposed_arguments(device: torch.device, context: Context) -> None:
    case = make_case(MIXED, device=device)
    expected, _ = plain_attention(case, AttentionSpec(0.3))
    fused = torch.full((case.q.shape[0], 10, 16), torch.nan, device=device)
    fused[:, 2:8] = case.q
    table = case.batch.page_table.T.contiguous().T
    lse = torch.full((6, case.q.shape[0]), torch.nan, device=device).T
    batch = replace(case.batch, page_table=table)
    out = PagedAttention(context)(fused[:, 2:8], case.kv, batch, AttentionSpec(0.3), lse)
    assert relative_error(out, expected) < 2e-6
    assert not lse.isnan().any()


def test_layers_share_a_batch(device: torch.device, context: Context) -> None:
    """Of different windows and numbers of heads; the bound of lengths may be far above them."""
    case = make_case([(1, 40), (3, 33), (0, 0)], device=device)
    table = torch.cat((case.batch.page_table, torch.zeros(3, 20, dtype=torch.int32, device=device)), dim=1)
    batch = replace(case.batch, max_kv_len=320, page_table=table)
    attention = PagedAttention(context)
    few = replace(case, q=case.q[:, :2])
    for spec, layer in ((AttentionSpec(0.3), case), (AttentionSpec(0.3, 9), case), (AttentionSpec(0.2, 9), few)):
        out = attention(layer.q, layer.kv, batch, spec)
        assert relative_error(out, plain_attention(layer, spec)[0]) < 2e-6


def test_row_does_not_depend_on_neighbours(device: torch.device, context: Context) -> None:
    case = make_case(MIXED, device=device)
    attention = PagedAttention(context)
    together = attention(case.q, case.kv, case.batch, AttentionSpec(0.3))
    starts = np.cumsum(case.batch.q_lens) - case.batch.q_lens
    for row in (1, 4):
        one = slice(row, row + 1)
        q_len, kv_len = case.rows[row]
        batch = AttentionBatch(
            case.batch.q_lens[one], case.batch.kv_lens[one], kv_len, case.batch.page_table[one], case.batch.page_size
        )
        tokens = slice(int(starts[row]), int(starts[row]) + q_len)
        alone = attention(case.q[tokens], case.kv, batch, AttentionSpec(0.3))
        torch.testing.assert_close(alone, together[tokens], atol=1e-6, rtol=1e-5)


def test_no_tokens(device: torch.device, context: Context) -> None:
    case = make_case([(1, 5), (1, 0)], device=device)
    batch = replace(case.batch, q_lens=np.zeros(2, dtype=np.int32))
    assert PagedAttention(context)(case.q[:0], case.kv, batch, AttentionSpec(0.3)).shape == (0, 6, 16)


class _LastOne(Tuner):
    """Tries every candidate, and takes the last one."""

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        assert default == next(iter(candidates))
        for call in candidates.values():
            call()
        self.asked = (op, key, tuple(candidates))
        return self.asked[2][-1]


def test_tuner_chooses(device: torch.device) -> None:
    tuner = _LastOne(device, None)
    case = make_case([(1, 70)] * 3, heads=(2, 1), dtype=torch.float16, device=device)
    _check(case, make_context(device, tuner), AttentionSpec(0.3))
    op, key, names = tuner.asked
    assert op == "decode_attention" and names == ("large", "large_split", "small", "small_split")
    # Three tiles and 70 keys count as 4 and 128.
    assert key[-3:] == (4, 1, 128)


def test_few_counts_of_rows_share_a_choice() -> None:
    counts = (1, 2, 3, 5, 8, 9, 17, 33, 40, 41, 64, 65, 97, 128, 129, 256, 257, 1025)
    found = [_row_class(rows) for rows in counts]
    assert found == [1, 2, 4, 8, 8, 16, 24, 40, 40, 48, 64, 80, 112, 128, 160, 256, 320, 1280]
    assert all(_row_class(kind) == kind for kind in found)
