"""Paged attention of the CPU kernels: against the torch reference, and the same bits however a step is put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.cpu import attention
from tests.support.packed import every_isa, needs_kernels, using
from tests.support.paged_rows import Context, Shape, Step

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int8)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


SMALL = Shape(9, 3, 64)
SHAPES = (SMALL, Shape(32, 8, 128), Shape(16, 2, 256), Shape(4, 4, 80), Shape(26, 1, 24), Shape(2, 1, 8))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "empty", lambda *shape: torch.full(shape, torch.nan))


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """torch's threads spin where ours want to run."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _check(step: Step) -> None:
    expected = step.expected()
    error = float((step.run() - expected).abs().max() / expected.abs().max())
    assert error < (0.02 if step.kv.dtype == torch.int8 else 1e-5)


@every_isa
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_reference(isa: str, dtype: torch.dtype, shape: Shape) -> None:
    rows = [(40, 290), (1, 40), (3, 3), (1, 1)] if shape.heads * shape.dim < 1000 else [(9, 270), (1, 30)]
    contexts = [(Context(shape, length, i, dtype), q_len, length) for i, (q_len, length) in enumerate(rows)]
    with using(isa):
        for page_size, window in ((16, None), (7, 50), (1, 259)):
            _check(Step(contexts, page_size, window=window))


@every_isa
@every_dtype
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_lengths(isa: str, dtype: torch.dtype, page_size: int) -> None:
    lengths = sorted({1, page_size, page_size + 1, max(page_size - 1, 1), 31, 33, 255, 256, 257, 700})
    context = Context(SMALL, 700, 1, dtype)
    with using(isa):
        for q_len in (1, 2):
            _check(Step([(context, min(q_len, length), length) for length in lengths], page_size))


def _by_position(
    context: Context, chunks: Sequence[int], page_size: int, window: int | None, neighbours: int = 0
) -> Tensor:
    """The output of a context's last tokens, computed in chunks, with other rows before and after."""
    done, outputs = context.length - sum(chunks), []
    shape = Shape(context.queries.shape[1], context.values.shape[2], context.queries.shape[2])
    for chunk in chunks:
        done += chunk
        others = [
            (Context(shape, 20 + 90 * i, 50 + i, context.stored.dtype), 1 + i * 5, 20 + 90 * i)
            for i in range(neighbours)
        ]
        rows = [*others[: neighbours // 2], (context, chunk, done), *others[neighbours // 2 :]]
        start = sum(q_len for _, q_len, _ in others[: neighbours // 2])
        outputs.append(Step(rows, page_size, window=window).run()[start : start + chunk])
    return torch.cat(outputs)


@every_isa
@every_dtype
@pytest.mark.parametrize(
    ("shape", "window"), [(SMALL, None), (SMALL, 100), (Shape(4, 4, 80), 200), (Shape(8, 1, 128), None)], ids=str
)
def test_same_bits_whatever_the_step(isa: str, dtype: torch.dtype, shape: Shape, window: int | None) -> None:
    context = Context(shape, 530, 3, dtype)
    with using(isa, threads=1):
        whole = _by_position(context, [280], 16, window)
        assert not whole.isnan().any()
        assert torch.equal(_by_position(context, [100, 9, 171], 16, window), whole)
        assert torch.equal(_by_position(context, [1] * 8, 7, window), whole[-8:])
        assert torch.equal(_by_position(context, [1, 2, 4, 1], 1, window, neighbours=3), whole[-8:])
    for threads in (2, 3):
        with using(isa, threads):
            assert torch.equal(_by_position(context, [250, 30], 64, window), whole)
            assert torch.equal(_by_position(context, [1, 3], 16, window), whole[-4:])
            assert torch.equal(_by_position(context, [40], 16, window, neighbours=4), whole[-40:])


@every_isa
@every_dtype
def test_long_contexts_are_shared_out(isa: str, dtype: torch.dtype) -> None:
    """One row, whose partitions go to several threads: the same bits as on one."""
    context = Context(Shape(6, 2, 16), 2000, 4, dtype)
    with using(isa, threads=1):
        expected = _by_position(context, [1], 16, None)
    for threads in (2, 3, 5):
        with using(isa, threads):
            assert torch.equal(_by_position(context, [1], 16, None), expected)


@every_isa
@every_dtype
def test_strides(isa: str, dtype: torch.dtype) -> None:
    """Pages with other layers in between or heads outside, queries as a part of the fused projection."""
    step = Step([(Context(SMALL, 90, 5, dtype), 40, 90), (Context(SMALL, 50, 6, dtype), 1, 50)], 16)
    pages, _, page_size, kv_heads, size = step.kv.shape
    layers = torch.full((pages, 3, 2, page_size, kv_heads, size), -1, dtype=dtype)
    layers[:, 1] = step.kv
    heads = step.kv.transpose(2, 3).contiguous().transpose(2, 3)
    fused = torch.full((len(step.q), 15, 64), torch.nan)
    fused[:, :9] = step.q
    with using(isa):
        expected = step.run()
        assert torch.equal(step.run(kv=layers[:, 1]), expected)
        assert torch.equal(step.run(kv=heads), expected)
        assert torch.equal(step.run(q=fused[:, :9]), expected)


@every_isa
def test_wide_page_table(isa: str) -> None:
    step = Step([(Context(SMALL, 90, 5, torch.float16), 3, 90)], 16)
    with using(isa):
        expected = step.run()
        batch = step.batch
        step.batch = AttentionBatch(batch.q_lens, batch.kv_lens, 90, batch.page_table.long(), 16)
        assert torch.equal(step.run(), expected)
        assert torch.equal(step.run(), expected)


@every_isa
@every_dtype
@pytest.mark.parametrize("q_len", [2, 40])
def test_nan_is_seen_by_those_who_see_it(isa: str, dtype: torch.dtype, q_len: int) -> None:
    context = Context(SMALL, 300, 7, dtype)
    clean = Step([(context, q_len, 300)], 16)
    pages = clean.batch.page_table[0]
    with using(isa):
        expected = clean.run()
        for half in (0, 1):
            # The last token but one, of the KV head 1.
            bad = clean.kv.clone()
            place = bad[pages[298 // 16], half, 298 % 16, 1]
            if dtype == torch.int8:
                place[64:] = -1
            else:
                place[5] = torch.nan
            out = clean.run(kv=bad)
            assert out[-2:, 3:6].isnan().any(-1).all()
            out[-2:, 3:6] = expected[-2:, 3:6]
            assert torch.equal(out, expected)
        bad_q = clean.q.clone()
        bad_q[1, 4, 7] = torch.nan
        out = clean.run(q=bad_q)
        assert out[1, 4].isnan().all()
        out[1, 4] = expected[1, 4]
        assert torch.equal(out, expected)


@every_isa
@every_dtype
def test_sharp_and_even_weights(isa: str, dtype: torch.dtype) -> None:
    """Scores hundreds apart, and all the same."""
    context = Context(SMALL, 600, 8, dtype)
    step = Step([(context, 3, 600)], 16)
    with using(isa):
        step.q *= 200
        if dtype != torch.int8:
            torch.testing.assert_close(step.run(), step.expected(), atol=2e-4, rtol=0)
        step.q *= 0
        _check(step)


@every_isa
@pytest.mark.parametrize(("shape", "q_len"), [(SMALL, 1), (SMALL, 40), (Shape(7, 1, 128), 1), (Shape(4, 4, 80), 9)])
def test_rounded_weights_are_precise(isa: str, shape: Shape, q_len: int) -> None:
    """With queries that are codes already, only the weights of int8 values are rounded."""
    context = Context(shape, 600, 9, torch.int8)
    context.queries = (context.queries * 8).round().clamp(-127, 127)
    context.queries[..., 0] = 127
    step = Step([(context, q_len, 600)], 16)
    step.q.mul_(0.05)
    with using(isa):
        expected = step.expected()
        assert float((step.run() - expected).abs().max() / expected.abs().max()) < 1e-3


@every_isa
@pytest.mark.parametrize("q_len", [1, 40])
def test_int8_values_of_any_scale(isa: str, q_len: int) -> None:
    """Scales of 0, almost too small for an inverse, and infinite."""
    step = Step([(Context(SMALL, 300, 10, torch.int8), q_len, 300)], 16)
    pages = step.batch.page_table[0, :19]
    scales = step.kv[pages, 1].view(torch.float32)[..., 16]
    with using(isa):
        usual = step.run()
        for factor in (0.0, 1e-32, torch.inf):
            kv = step.kv.clone()
            kv[pages, 1, :, :, 64:] = (scales * factor).unsqueeze(-1).view(torch.int8)
            out = step.run(kv=kv)
            if factor == torch.inf:
                assert out.isnan().all()
            else:
                torch.testing.assert_close(out, usual * factor, atol=float(usual.abs().max()) * factor / 100, rtol=0)
