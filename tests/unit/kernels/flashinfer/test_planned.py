"""The planned kernels: plans by what comes out of a stand-in, how often they are made, and refusals."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from kernels.attention import AttentionSpec, TreeMask, paged_attention
from kernels.cuda.context import Context
from kernels.flashinfer.arguments import host_rows
from kernels.flashinfer.library import flashinfer
from kernels.flashinfer.planned import PlannedDecode, PlannedPrefill
from kernels.pages import page_lists
from tests.support.attention_cases import relative_error
from tests.unit.kernels.flashinfer.batches import Step, make_step
from tests.unit.kernels.flashinfer.fake import FakeFlashInfer

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
Kind = type[PlannedPrefill] | type[PlannedDecode]
BOTH = pytest.mark.parametrize("kind", (PlannedPrefill, PlannedDecode))


def compare(kind: Kind, context: Context, library: FakeFlashInfer, step: Step, wants_lse: bool = False) -> None:
    lse, reference_lse = (torch.full(step.q.shape[:2], torch.nan) for _ in range(2))
    kernel = kind(context, library)
    out = kernel(step.q, step.kv, step.batch, step.spec, lse if wants_lse else None)
    reference = paged_attention(step.q, step.kv, replace(step.batch), step.spec, reference_lse if wants_lse else None)
    assert out.dtype == step.q.dtype and relative_error(out, reference) < 2e-3
    if wants_lse:
        assert torch.allclose(lse, reference_lse, atol=2e-3)


@pytest.mark.parametrize("wants_lse", (False, True))
@pytest.mark.parametrize("host_kv_lens", (False, True))
@pytest.mark.parametrize("page_size", (1, 7, 16))
def test_ragged_rows(
    context: Context, library: FakeFlashInfer, page_size: int, host_kv_lens: bool, wants_lse: bool
) -> None:
    step = make_step((5, 1, 0, 1, 16), (21, 14, 9, 0, 16), page_size=page_size, host_kv_lens=host_kv_lens, scale=0.3)
    compare(PlannedPrefill, context, library, step, wants_lse)


def test_decode(context: Context, library: FakeFlashInfer) -> None:
    compare(PlannedDecode, context, library, make_step((1, 1, 1), (33, 0, 16)), wants_lse=True)


@BOTH
@pytest.mark.parametrize("wants_lse", (False, True))
@pytest.mark.parametrize(
    "spec", ({"window": 6}, {"softcap": 3.0}, {"sinks": SINKS}, {"sinks": SINKS, "window": 4, "softcap": 5.0})
)
def test_specs(kind: Kind, context: Context, library: FakeFlashInfer, spec: dict[str, object], wants_lse: bool) -> None:
    compare(kind, context, library, make_step((1, 1, 1), (20, 0, 5), **spec), wants_lse)


@BOTH
def test_fp8_pages_with_scales(kind: Kind, context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (20, 5), kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=1.7)
    compare(kind, context, library, step, wants_lse=True)


@BOTH
def test_only_rows_without_context(kind: Kind, context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (0, 0))
    lse = torch.full((2, 4), torch.nan)
    out = kind(context, library)(step.q, step.kv, step.batch, step.spec, lse)
    assert not out.any() and lse.isneginf().all()
    assert not library.made


@BOTH
def test_layers_that_agree_share_a_plan(kind: Kind, context: Context, library: FakeFlashInfer) -> None:
    step = make_step((1, 1), (20, 5))
    kernel = kind(context, library)
    windowed = AttentionSpec(scale=step.spec.scale, window=4)
    for spec in (step.spec, windowed, step.spec, windowed):
        out = kernel(step.q, step.kv, step.batch, spec)
        assert relative_error(out, paged_attention(step.q, step.kv, replace(step.batch), spec)) < 2e-3
    assert [wrapper.num_plans for wrapper in library.made] == [1, 1]


@BOTH
def test_steps_alive_together_do_not_disturb_each_other(kind: Kind, context: Context, library: FakeFlashInfer) -> None:
    kernel = kind(context, library)
    steps = [make_step((1, 1), (20, 5), seed=1), make_step((1, 1, 1), (3, 9, 17), seed=2)]
    for _ in range(2):
        for step in steps:
            out = kernel(step.q, step.kv, step.batch, step.spec)
            assert relative_error(out, paged_attention(step.q, step.kv, replace(step.batch), step.spec)) < 2e-3
    assert [wrapper.num_plans for wrapper in library.made] == [1, 1]


@BOTH
def test_a_finished_steps_wrapper_is_planned_anew(kind: Kind, context: Context, library: FakeFlashInfer) -> None:
    kernel = kind(context, library)
    for seed in range(3):
        step = make_step((1, 1), (20, 5), seed=seed)
        kernel(step.q, step.kv, step.batch, step.spec)
        del step
    assert [wrapper.num_plans for wrapper in library.made] == [3]


def test_lengths_on_the_host_are_believed(context: Context) -> None:
    step = make_step((1, 1), (20, 5), host_kv_lens=True)
    rows = host_rows(step.batch, page_lists)
    assert rows.q_starts.tolist() == [0, 1, 2] and rows.page_starts.tolist() == [0, 2, 3]
    assert rows.last_page_lens.tolist() == [4, 5] and rows.empty_tokens is None
    assert rows.pages.tolist() == [*step.batch.page_table[0, :2].tolist(), int(step.batch.page_table[1, 0])]
    assert host_rows(step.batch, page_lists) is rows


def test_another_page_lists_is_used(context: Context, library: FakeFlashInfer) -> None:
    sizes: list[int] = []

    def counted(table: torch.Tensor, lens: torch.Tensor, page_size: int, size: int) -> tuple[torch.Tensor, ...]:
        sizes.append(size)
        return page_lists(table, lens, page_size, size)

    step = make_step((2, 1), (20, 5))
    PlannedPrefill(context, library, counted)(step.q, step.kv, step.batch, step.spec)
    assert sizes == [3]


def test_backend_without_hopper(context: Context, library: FakeFlashInfer) -> None:
    step = make_step((2, 1), (20, 5))
    PlannedPrefill(context, library)(step.q, step.kv, step.batch, step.spec)
    assert [wrapper.backend for wrapper in library.made] == ["fa2"]


def test_backend_on_hopper(context: Context, library: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.flashinfer.planned.capability", lambda device: (9, 0))
    kernel = PlannedPrefill(context, library)
    for kv_dtype in (torch.float16, torch.float8_e4m3fn):
        step = make_step((2, 1), (20, 5), kv_dtype=kv_dtype)
        kernel(step.q, step.kv, step.batch, step.spec)
    assert [wrapper.backend for wrapper in library.made] == ["fa3", "fa2"]


TREE = TreeMask(torch.eye(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("kind", "step", "reason"),
    (
        (PlannedPrefill, make_step((2,), (5,), tree=TREE), "prefill does not take a tree mask"),
        (PlannedPrefill, make_step((2,), (5,), head_dim=80), "prefill does not take a head_dim of 80"),
        (PlannedPrefill, make_step((2,), (5,), dtype=torch.float32), "prefill does not take queries of torch.float32"),
        (PlannedDecode, make_step((2, 2), (5, 5)), "decode does not take rows that add 2 tokens"),
        (PlannedDecode, make_step((1, 0), (5, 5)), "decode does not take rows that add different numbers"),
    ),
)
def test_refusals(kind: Kind, context: Context, library: FakeFlashInfer, step: Step, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        kind(context, library)(step.q, step.kv, step.batch, step.spec)


@BOTH
def test_takes_says_what_a_dispatcher_asks(kind: Kind) -> None:
    takes, step = kind.takes, make_step((1, 1), (20, 5))
    assert takes.needs_host_lengths and not takes.cuda_graph and takes.lse
    assert takes.refusal(step.q, step.kv, step.batch, step.spec, None) is None


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_flashinfer_the_extra_is_named() -> None:
    with pytest.raises(ValueError, match=r"engine-serve\[cuda\]"):
        flashinfer()
