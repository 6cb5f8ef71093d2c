"""The choice between our own attention and FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from kernels.attention import SharedPrefix, paged_attention
from kernels.cuda.context import Context
from kernels.cuda.tuning import Key, Tuner
from kernels.flashinfer.fastest import OWN, FastestAttention
from tests.unit.kernels.flashinfer.batches import make_step
from tests.unit.kernels.flashinfer.fake import FakeFlashInfer

CPU = torch.device("cpu")


class _Offered(Tuner):
    """Takes what it is told to; notes what it could have taken."""

    def __init__(self, taken: str) -> None:
        super().__init__(CPU, None)
        self.taken = taken
        self.offers: list[set[str]] = []

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        if op != "attention":
            return default
        self.offers.append(set(candidates))
        return self.taken if self.taken in candidates else default


@pytest.mark.parametrize("taken", [OWN, "flashinfer XQA"])
def test_decoding(taken: str, context: Context, library: FakeFlashInfer) -> None:
    tuner = _Offered(taken)
    step = make_step((1, 1), (20, 5))
    attend = FastestAttention(replace(context, tuner=tuner), library)
    expected = paged_attention(step.q, step.kv, replace(step.batch), step.spec)
    for _ in range(2):
        got = attend(step.q, step.kv, step.batch, step.spec)
        torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    # Asked once a step; planning at every step is not worth it for single tokens.
    assert tuner.offers == [{OWN, "flashinfer XQA"}]
    assert len(library.xqa_calls) == (2 if taken != OWN else 0)


def test_prompts_may_be_planned_where_the_host_knows_their_lengths(context: Context, library: FakeFlashInfer) -> None:
    tuner = _Offered("flashinfer prefill")
    attend = FastestAttention(replace(context, tuner=tuner), library)
    step = make_step((70, 1), (80, 5))
    expected = paged_attention(step.q, step.kv, replace(step.batch), step.spec)
    known = replace(step.batch, host_kv_lens=np.array([80, 5]))
    for batch in (replace(step.batch), known):
        torch.testing.assert_close(attend(step.q, step.kv, batch, step.spec), expected, atol=2e-3, rtol=2e-3)
    assert tuner.offers == [{OWN}, {OWN, "flashinfer prefill"}]


def test_prompts_beside_many_single_tokens_are_not_planned(context: Context, library: FakeFlashInfer) -> None:
    tuner = _Offered("flashinfer prefill")
    attend = FastestAttention(replace(context, tuner=tuner), library)
    for num_single in (4, 5):
        step = make_step((70, *[1] * num_single), (80, *[5] * num_single))
        lens = np.array([80, *[5] * num_single])
        attend(step.q, step.kv, replace(step.batch, host_kv_lens=lens), step.spec)
    assert tuner.offers == [{OWN, "flashinfer prefill"}, {OWN}]


def test_what_was_chosen_for_a_prompt_is_taken_behind_any_context(context: Context, library: FakeFlashInfer) -> None:
    tuner = Tuner(CPU, None, lambda call: float("own" in str(call).lower()))
    attend = FastestAttention(replace(context, tuner=tuner), library)

    def chosen(q_lens: tuple[int, ...], kv_lens: tuple[int, ...]) -> str:
        step = make_step(q_lens, kv_lens)
        batch = replace(step.batch, host_kv_lens=np.array(kv_lens))
        return attend._choose(step.q, step.kv, batch, step.spec, None)

    first = chosen((70,), (70,))
    tuner.freeze()
    assert first == "flashinfer prefill"
    assert {chosen((70,), (90,)), chosen((1, 70), (80, 200)), chosen((100, 70), (100, 300))} == {first}
    assert chosen((300,), (300,)) == OWN


def test_a_shared_prefix_is_read_once_by_our_own(context: Context, library: FakeFlashInfer) -> None:
    tuner = _Offered("flashinfer XQA")
    attend = FastestAttention(replace(context, tuner=tuner), library)
    step = make_step((1, 1), (20, 5))
    for lens in ([0], [16]):
        hint = SharedPrefix(np.array([0, 2], np.int32), np.array(lens, np.int32))
        attend._choose(step.q, step.kv, replace(step.batch, prefix=hint), step.spec, None)
    assert tuner.offers == [{OWN, "flashinfer XQA"}, {OWN}]


def test_pages_that_xqa_does_not_take(context: Context, library: FakeFlashInfer) -> None:
    tuner = _Offered("flashinfer XQA")
    step = make_step((1, 1), (20, 5))
    padded = torch.zeros(*step.kv.shape[:4], step.kv.shape[4] + 8, dtype=step.kv.dtype)[..., : step.kv.shape[4]]
    padded.copy_(step.kv)
    FastestAttention(replace(context, tuner=tuner), library)(step.q, padded, step.batch, step.spec)
    assert tuner.offers == [{OWN}]


@pytest.mark.parametrize("error", [ImportError("libcudart.so"), RuntimeError("no nvcc")])
def test_a_flashinfer_that_fails_is_left_out(
    error: Exception, context: Context, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> ModuleType:
        raise error

    monkeypatch.setattr("kernels.flashinfer.library.importlib.import_module", fail)
    attend = FastestAttention(context)
    assert "flashinfer_unusable" in caplog.text and str(error) in caplog.text
    step = make_step((1, 1), (20, 5))
    expected = paged_attention(step.q, step.kv, replace(step.batch), step.spec)
    torch.testing.assert_close(attend(step.q, step.kv, step.batch, step.spec), expected, atol=2e-3, rtol=2e-3)
