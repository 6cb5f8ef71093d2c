"""FlashInfer's kernels under our contract, against the torch reference in float32.

FlashInfer compiles each kind of module at first use, which takes a minute and nvcc; with FLASHINFER_DISABLE_JIT=1 only
modules that are there already are tested.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.attention import TreeMask, paged_attention
from kernels.dispatch import AttentionKernel
from tests.support.attention_cases import relative_error
from tests.unit.kernels.flashinfer.batches import Step, make_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer-python"),
]

BF16 = torch.bfloat16
LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16, "device": "cuda"}
GPT_OSS = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "dtype": BF16, "device": "cuda"}
SMALL = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "dtype": BF16, "device": "cuda"}
# One row, a few with an empty one (rows are divided into parts), and more than need dividing.
BATCHES = ((1088,), (700, 0, 65, 1), (*range(1, 1500, 37), 0, 2048))


@pytest.fixture(scope="module")
def kernels() -> dict[str, AttentionKernel]:
    from kernels.cuda.context import make_context
    from kernels.cuda.tuning import Tuner
    from kernels.flashinfer.planned import PlannedDecode, PlannedPrefill
    from kernels.flashinfer.xqa import XqaDecode

    device = torch.device("cuda")
    context = make_context(device, Tuner(device, None))
    return {"xqa": XqaDecode(context), "decode": PlannedDecode(context), "prefill": PlannedPrefill(context)}


def call(kernel: AttentionKernel, step: Step, lse: Tensor | None = None) -> Tensor:
    from flashinfer.jit.core import MissingJITCacheError

    try:
        return kernel(step.q, step.kv, step.batch, step.spec, lse)
    except MissingJITCacheError as e:
        pytest.skip(f"not compiled: {e.spec.name if e.spec else e}")


def reference(step: Step, lse: Tensor | None = None) -> Tensor:
    return paged_attention(step.q.float(), step.kv.float(), replace(step.batch), step.spec, lse)


def compare(kernel: AttentionKernel, step: Step, *, wants_lse: bool = False, tolerance: float = 1e-2) -> None:
    lse, wanted_lse = (torch.full(step.q.shape[:2], math.nan, device="cuda") for _ in range(2))
    out = call(kernel, step, lse if wants_lse else None)
    wanted = reference(step, wanted_lse if wants_lse else None)
    assert relative_error(out, wanted) < tolerance
    empty = np.repeat(step.batch.kv_lens.cpu().numpy() == 0, step.batch.q_lens)
    assert not out[torch.from_numpy(empty).cuda()].any()
    if wants_lse:
        assert torch.equal(lse.isneginf(), wanted_lse.isneginf())
        assert torch.allclose(lse, wanted_lse, atol=2e-2)


@pytest.mark.parametrize("kv_lens", BATCHES, ids=len)
@pytest.mark.parametrize("page_size", (16, 64, 128))
def test_xqa(kernels: dict[str, AttentionKernel], page_size: int, kv_lens: Sequence[int]) -> None:
    compare(kernels["xqa"], make_step([1] * len(kv_lens), kv_lens, page_size=page_size, **LLAMA))


@pytest.mark.parametrize("kv_lens", BATCHES, ids=len)
def test_xqa_of_small_heads(kernels: dict[str, AttentionKernel], kv_lens: Sequence[int]) -> None:
    compare(kernels["xqa"], make_step([1] * len(kv_lens), kv_lens, page_size=64, **SMALL))


@pytest.mark.parametrize("kv_lens", BATCHES, ids=len)
def test_xqa_sinks(kernels: dict[str, AttentionKernel], kv_lens: Sequence[int]) -> None:
    sinks = torch.randn(32, device="cuda")
    compare(kernels["xqa"], make_step([1] * len(kv_lens), kv_lens, page_size=64, sinks=sinks, **LLAMA))


@pytest.mark.parametrize("kv_lens", BATCHES, ids=len)
def test_xqa_window_and_sinks(kernels: dict[str, AttentionKernel], kv_lens: Sequence[int]) -> None:
    sinks = torch.randn(64, device="cuda")
    step = make_step([1] * len(kv_lens), kv_lens, page_size=64, sinks=sinks, window=128, **GPT_OSS)
    compare(kernels["xqa"], step)


@pytest.mark.parametrize("has_tree", (False, True))
@pytest.mark.parametrize("kv_lens", ((1088,), (700, 0, 65, 4), tuple(range(4, 1500, 37))), ids=len)
def test_xqa_drafted(kernels: dict[str, AttentionKernel], kv_lens: Sequence[int], has_tree: bool) -> None:
    rows = len(kv_lens)
    tree = None
    if has_tree:
        # A root, two children, a child of the second.
        visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
        depths = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
        tree = TreeMask(visible.repeat(rows, 1).cuda(), depths.repeat(rows).cuda())
    compare(kernels["xqa"], make_step([4] * rows, kv_lens, page_size=64, tree=tree, **LLAMA))


def test_xqa_in_a_graph(kernels: dict[str, AttentionKernel]) -> None:
    step = make_step([1] * 8, [600, 64, 65, 1, 0, 0, 300, 599], page_size=64, **LLAMA)
    call(kernels["xqa"], step)
    batch = replace(step.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels["xqa"](step.q, step.kv, batch, step.spec)
    # Shorter contexts of the same pages, then the first ones again.
    lens = batch.kv_lens.clone()
    for changed in (lens // 2, lens):
        batch.kv_lens.copy_(changed)
        out.fill_(math.nan)
        graph.replay()
        assert relative_error(out, reference(step)) < 1e-2


def test_xqa_leaves_its_counters_at_zero(kernels: dict[str, AttentionKernel]) -> None:
    call(kernels["xqa"], make_step((1,), (1088,), page_size=64, **LLAMA))
    assert not kernels["xqa"]._semaphores.any()  # ty: ignore[unresolved-attribute]


PREFILLS = (
    ((512,), (512,)),
    ((300, 1, 0, 1, 77), (300, 900, 50, 0, 1000)),
    ((1000, 24), (5000, 24)),
)


@pytest.mark.parametrize("wants_lse", (False, True))
@pytest.mark.parametrize(("q_lens", "kv_lens"), PREFILLS)
@pytest.mark.parametrize("page_size", (1, 64))
def test_prefill(
    kernels: dict[str, AttentionKernel], page_size: int, q_lens: Sequence[int], kv_lens: Sequence[int], wants_lse: bool
) -> None:
    compare(kernels["prefill"], make_step(q_lens, kv_lens, page_size=page_size, **LLAMA), wants_lse=wants_lse)


@pytest.mark.parametrize(("q_lens", "kv_lens"), PREFILLS)
def test_prefill_of_small_heads(
    kernels: dict[str, AttentionKernel], q_lens: Sequence[int], kv_lens: Sequence[int]
) -> None:
    compare(kernels["prefill"], make_step(q_lens, kv_lens, page_size=64, **SMALL), wants_lse=True)


def test_prefill_sinks(kernels: dict[str, AttentionKernel]) -> None:
    step = make_step((300, 1, 1, 77), (300, 900, 0, 1000), page_size=64, sinks=torch.randn(32, device="cuda"), **LLAMA)
    compare(kernels["prefill"], step, wants_lse=True)


@pytest.mark.parametrize("spec", ({"window": 200}, {"softcap": 5.0}), ids=str)
@pytest.mark.parametrize("kind", ("prefill", "decode"))
def test_planned_specs(kernels: dict[str, AttentionKernel], kind: str, spec: dict[str, float]) -> None:
    q_lens = (1, 1, 1) if kind == "decode" else (300, 1, 150)
    compare(kernels[kind], make_step(q_lens, (300, 900, 1000), page_size=64, **spec, **LLAMA))


@pytest.mark.parametrize("kind", ("prefill", "decode"))
def test_planned_fp8(kernels: dict[str, AttentionKernel], kind: str) -> None:
    step = make_step(
        (1, 1, 1),
        (300, 0, 1000),
        page_size=64,
        kv_dtype=torch.float8_e4m3fn,
        k_scale=0.7,
        v_scale=1.3,
        **LLAMA,
    )
    compare(kernels[kind], step)


@pytest.mark.parametrize("wants_lse", (False, True))
@pytest.mark.parametrize("kv_lens", BATCHES, ids=len)
def test_decode(kernels: dict[str, AttentionKernel], kv_lens: Sequence[int], wants_lse: bool) -> None:
    compare(kernels["decode"], make_step([1] * len(kv_lens), kv_lens, page_size=16, **LLAMA), wants_lse=wants_lse)


def test_plans_of_steps_that_follow_each_other(kernels: dict[str, AttentionKernel]) -> None:
    """With lengths on the host nothing waits: a plan is made while the device has yet to read the last one."""
    steps = [
        make_step((1, 1, 1), (300 + 400 * i, 50 * i, 1000), page_size=64, seed=i, host_kv_lens=True, **LLAMA)
        for i in range(4)
    ]
    call(kernels["decode"], steps[0])
    torch.cuda._sleep(10**8)
    # Each step's rows are gone when the next is planned, so all use one wrapper.
    outs = [kernels["decode"](step.q, step.kv, replace(step.batch), step.spec) for step in steps]
    for step, out in zip(steps, outs, strict=True):
        assert relative_error(out, reference(step)) < 1e-2
