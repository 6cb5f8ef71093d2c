"""Paged attention in Triton at real sizes: layouts of heads, pages, dtypes, masks; races; graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionSpec, CommonPrefix
from kernels.cuda.attention import PagedAttention
from kernels.cuda.context import Context, make_context
from kernels.cuda.tuning import Key, Tuner
from tests.support.attention_cases import Case, make_case, plain_attention, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

HEADS = {"9/3x64": ((9, 3), 64), "32/8x128": ((32, 8), 128), "16/2x256": ((16, 2), 256)}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class _Wanted(Tuner):
    """Takes the candidate of a name, where there is one."""

    def __init__(self, wanted: str) -> None:
        super().__init__(torch.device("cuda"), None)
        self._wanted = wanted

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        return self._wanted if self._wanted in candidates else default


@pytest.fixture(scope="module")
def context() -> Context:
    """That measures nothing: what is tested must not depend on the weather."""
    return make_context(torch.device("cuda"), _Wanted("the default"))


def _decode_lengths(page_size: int) -> list[tuple[int, int]]:
    lengths = [1, max(page_size - 1, 1), page_size, page_size + 1, 127, 128, 129, 1000, 4097, 0]
    return [(1, length) for length in lengths]


def _case(
    heads: str, rows: Sequence[tuple[int, int]], page_size: int = 16, dtype: torch.dtype = torch.bfloat16, **more
) -> Case:
    numbers, head_dim = HEADS[heads]
    return make_case(
        rows, heads=numbers, head_dim=head_dim, page_size=page_size, dtype=dtype, device="cuda", seed=3, **more
    )


def _spec(case: Case, **more) -> AttentionSpec:
    return AttentionSpec(case.q.shape[2] ** -0.5, **more)


def _check(case: Case, context: Context, spec: AttentionSpec, splits: int | None = None) -> Tensor:
    lse = torch.full(case.q.shape[:2], torch.nan, device="cuda")
    out = PagedAttention(context, splits=splits, min_saved=1)(case.q, case.kv, case.batch, spec, lse)
    expected, expected_lse = plain_attention(case, spec)
    assert relative_error(out, expected) < TOLERANCE[case.q.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-3, rtol=1e-3)
    assert not context.tickets.any()
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode(heads: str, page_size: int, dtype: torch.dtype, context: Context) -> None:
    case = _case(heads, _decode_lengths(page_size), page_size, dtype)
    _check(case, context, _spec(case))
    _check(case, context, _spec(case), splits=7)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_mixed_batch(heads: str, page_size: int, context: Context) -> None:
    rows = [*_decode_lengths(page_size), (700, 700), (0, 0), (5, 4097), (300, 2500), (16, 900)]
    case = _case(heads, rows, page_size)
    _check(case, context, _spec(case))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_pages(heads: str, kv_dtype: torch.dtype, context: Context) -> None:
    case = _case(heads, [*_decode_lengths(16), (200, 900), (10, 333)], kv_dtype=kv_dtype)
    _check(case, context, _spec(case, k_scale=0.7, v_scale=1.9))


def test_float32(context: Context) -> None:
    case = _case("32/8x128", [(1, 900), (1, 17), (90, 400), (4, 100)], dtype=torch.float32)
    _check(case, context, _spec(case))


@pytest.mark.parametrize(("heads", "head_dim"), [((8, 1), 80), ((8, 4), 96), ((16, 16), 128), ((32, 2), 128)])
def test_other_heads(heads: tuple[int, int], head_dim: int, context: Context) -> None:
    rows = [(1, 500), (1, 1), (1, 63), (200, 300), (6, 77)]
    case = make_case(rows, heads=heads, head_dim=head_dim, page_size=7, dtype=torch.bfloat16, device="cuda")
    _check(case, context, _spec(case))


@pytest.mark.parametrize("window", [1, 100, 1024])
def test_windows(window: int, context: Context) -> None:
    case = _case("32/8x128", [*_decode_lengths(16), (600, 2000), (20, 1500)])
    sinks = torch.linspace(-2.0, 4.0, 32, device="cuda")
    _check(case, context, _spec(case, window=window, sinks=sinks))


def test_softcap(context: Context) -> None:
    case = _case("16/2x256", [*_decode_lengths(16), (300, 1100)])
    _check(case, context, _spec(case, softcap=2.0))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("nodes", [4, 12, 60])
def test_trees(heads: str, window: int | None, nodes: int, context: Context) -> None:
    case = _case(heads, [(nodes, 1000), (nodes, nodes), (nodes, 3333)], tree=True)
    _check(case, context, _spec(case, window=window))


@pytest.mark.parametrize("heads", HEADS)
def test_shared_prefix(heads: str, context: Context) -> None:
    rows = [(1, 2048 + 13 * i) for i in range(1, 21)] + [(1, 50), (1, 900), (1, 700)] + [(4, 1100), (90, 1200)]
    case = _case(heads, rows, prefix=[(20, 2048), (1, 48), (2, 640), (2, 1024)])
    sinks = torch.linspace(-2.0, 4.0, case.q.shape[1], device="cuda")
    _check(case, context, _spec(case, sinks=sinks))


@pytest.mark.parametrize("splits", [None, 2, 16])
def test_the_same_bits_every_time(splits: int | None, context: Context) -> None:
    """Programs that merge parts must see all of them, whoever comes last."""
    rows = [(1, 100 + 397 * i) for i in range(12)]
    case = _case("32/8x128", rows)
    attention = PagedAttention(context, splits=splits)
    results = [attention(case.q, case.kv, case.batch, _spec(case)) for _ in range(20)]
    assert relative_error(results[0], plain_attention(case, _spec(case))[0]) < 1e-2
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("nodes", [1, 5])
def test_graph_replays_with_other_lengths(nodes: int, context: Context) -> None:
    case = _case("32/8x128", [(nodes, 3000)] * 4, tree=nodes > 1)
    attention = PagedAttention(context)
    attention(case.q, case.kv, case.batch, _spec(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.kv, case.batch, _spec(case))
    for lengths in ([3000, 3000, 3000, 3000], [nodes, 700, 129, 3000], [0, 64, 2999, 300]):
        case.batch.kv_lens.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        rows = tuple((nodes, length) for length in lengths)
        contents = tuple(part[:, :length] for part, length in zip(case.contents, lengths, strict=True))
        expected, _ = plain_attention(replace(case, rows=rows, contents=contents), _spec(case))
        assert relative_error(out, expected) < 1e-2
    assert not context.tickets.any()


@pytest.mark.parametrize("heads", HEADS)
def test_graph_of_rows_with_a_common_prefix(heads: str, context: Context) -> None:
    """Who has it, and how long it is, may differ at each replay."""
    rows = [(1, 2048 + 37 * i) for i in range(1, 31)] + [(1, 50), (1, 2100)]
    case = _case(heads, rows, prefix=[(30, 2048), (1, 0), (1, 0)])
    expected, _ = plain_attention(case, _spec(case))
    lens = torch.zeros(len(rows), dtype=torch.int32, device="cuda")
    batch = replace(case.batch, prefix=None, common=CommonPrefix(case.batch.page_table[:1], lens))
    attention = PagedAttention(context)
    attention(case.q, case.kv, batch, _spec(case))
    batch = replace(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.kv, batch, _spec(case))
    for length, members in ((2048, slice(0, 30)), (0, slice(0, 0)), (1024, slice(3, 20)), (16, slice(0, 30, 2))):
        lens.zero_()
        lens[members] = length
        out.fill_(torch.nan)
        graph.replay()
        assert relative_error(out, expected) < 1e-2
    assert not context.tickets.any()


def test_graph_of_a_mixed_batch(context: Context) -> None:
    """Its list of tiles outlives the batch."""
    case = _case("32/8x128", [(1, 300), (7, 500), (100, 800)])
    attention = PagedAttention(context)
    expected = attention(case.q, case.kv, case.batch, _spec(case))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.kv, case.batch, _spec(case))
    case.batch.memo.clear()
    torch.full((100, 100), -1, dtype=torch.int32, device="cuda")
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize("wanted", ["large", "large_split", "small", "small_split", "deep"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_candidate_is_right(wanted: str, heads: str) -> None:
    case = _case(heads, [(1, 1500), (1, 200), (10, 1200), (500, 900)])
    _check(case, make_context(torch.device("cuda"), _Wanted(wanted)), _spec(case))
