"""XqaDecode: what it tells FlashInfer, by what comes out of a stand-in that does what it is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import TreeMask, paged_attention
from kernels.cuda.context import Context
from kernels.flashinfer.arguments import device_rows, packed_mask
from kernels.flashinfer.xqa import XqaDecode
from tests.support.attention_cases import relative_error
from tests.unit.kernels.flashinfer.batches import Step, make_step
from tests.unit.kernels.flashinfer.fake import FakeFlashInfer


def compare(context: Context, library: FakeFlashInfer, step: Step, tolerance: float = 2e-3) -> None:
    out = XqaDecode(context, library)(step.q, step.kv, step.batch, step.spec)
    reference = paged_attention(step.q, step.kv, replace(step.batch), step.spec)
    assert out.dtype == step.q.dtype and out.shape == step.q.shape
    assert relative_error(out, reference) < tolerance


@pytest.mark.parametrize("page_size", (16, 32, 64, 128))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_decode(context: Context, library: FakeFlashInfer, page_size: int, dtype: torch.dtype) -> None:
    step = make_step((1, 1, 1, 1), (33, 1, 0, 16), page_size=page_size, dtype=dtype, scale=0.3)
    compare(context, library, step, 2e-3 if dtype == torch.float16 else 1e-2)


def test_drafted_tokens_see_those_before_them(context: Context, library: FakeFlashInfer) -> None:
    compare(context, library, make_step((3, 3, 3), (20, 3, 0)))


def test_a_tree_decides_among_its_own_tokens(context: Context, library: FakeFlashInfer) -> None:
    visible = torch.eye(8, dtype=torch.bool)[torch.arange(8) % 4]
    visible[[1, 2, 3, 7], 0] = True
    tree = TreeMask(visible, torch.tensor([0, 1, 1, 1, 0, 0, 0, 1], dtype=torch.int32))
    compare(context, library, make_step((4, 4), (20, 7), tree=tree))


def test_bits_of_more_than_a_word(context: Context) -> None:
    batch = make_step((40, 40), (40, 41)).batch
    mask = packed_mask(batch, 40)
    assert mask.dtype == torch.int32 and mask.shape == (2, 40, 2)
    assert mask[1, 31].tolist() == [-1, 0] and mask[0, 33].tolist() == [-1, 0b11]
    assert packed_mask(batch, 40) is mask


def test_window(context: Context, library: FakeFlashInfer) -> None:
    compare(context, library, make_step((1, 1), (40, 5), window=7))


def test_sinks(context: Context, library: FakeFlashInfer) -> None:
    compare(context, library, make_step((1, 1, 1), (20, 0, 5), sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])))


def test_queries_of_a_fused_projection(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (20, 4))
    fused = torch.full((2, 8, 64), torch.nan, dtype=torch.float16)
    fused[:, 2:6] = step.q
    compare(context, library, Step(fused[:, 2:6], step.kv, step.batch, step.spec))


def test_tables_are_converted_once_a_step(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (20, 4))
    kernel = XqaDecode(context, library)
    for _ in range(2):
        kernel(step.q, step.kv, step.batch, step.spec)
    first, second = library.xqa_calls
    assert first["page_table"] is second["page_table"]
    assert device_rows(step.batch).page_table is step.batch.page_table


def test_a_table_that_is_a_view_is_made_dense(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (20, 4), spare_columns=3)
    batch = step.batch
    wide = batch.page_table.long()[:, :2]
    assert not wide.is_contiguous()
    narrow = type(batch)(batch.q_lens, batch.kv_lens, batch.max_kv_len, wide, batch.page_size)
    compare(context, library, Step(step.q, step.kv, narrow, step.spec))


@pytest.mark.parametrize(
    ("step", "reason"),
    (
        (make_step((1, 1), (5, 5), softcap=30.0), "a softcap"),
        (make_step((1, 2), (5, 5)), "rows that add different numbers"),
        (make_step((1, 0), (5, 5)), "rows that add different numbers"),
        (make_step((2, 2), (5, 5), window=4), "rows that add 2 tokens to a window"),
        (make_step((40,), (50,)), "rows that add 40 tokens"),
        (make_step((1,), (5,), page_size=8), "pages of 8 tokens"),
        (make_step((1,), (5,), head_dim=80), "a head_dim of 80"),
        (make_step((1,), (5,), dtype=torch.float32), "queries of torch.float32"),
        (make_step((1,), (5,), kv_dtype=torch.bfloat16), "pages of torch.bfloat16 with queries of torch.float16"),
        (make_step((1,), (5,), v_scale=2.0), "a v_scale for pages that are not quantised"),
    ),
)
def test_refusals(context: Context, library: FakeFlashInfer, step: Step, reason: str) -> None:
    with pytest.raises(ValueError, match=f"XQA does not take {reason}"):
        XqaDecode(context, library)(step.q, step.kv, step.batch, step.spec)
    assert not library.xqa_calls


def test_an_lse_is_refused(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1,), (5,))
    with pytest.raises(ValueError, match="a wanted lse"):
        XqaDecode(context, library)(step.q, step.kv, step.batch, step.spec, torch.empty(1, 4))


def test_no_tokens(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((0,), (5,))
    assert XqaDecode(context, library)(step.q, step.kv, step.batch, step.spec).shape == (0, 4, 64)
