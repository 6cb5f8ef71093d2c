"""Every family and feature against transformers, and every feature shown to matter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.model_files.types import RopeConfig
from kernels.attention import paged_attention
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.spec import DecoderSpec
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import PagedRunner, cpu_kernels, decoder_from, run_one, spec_in

PROMPT, DECODED = 64, 16
BOUND = 1e-4


@dataclass(frozen=True)
class Case:
    """A tiny model, and the spec with its special feature taken away (None: nothing to take away)."""

    family: str
    overrides: tuple[tuple[str, Any], ...] = ()
    without: Callable[[DecoderSpec], DecoderSpec] | None = None


def _case(family: str, without: Callable[[DecoderSpec], DecoderSpec] | None = None, **overrides: Any) -> Case:
    return Case(family, tuple(overrides.items()), without)


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_scaling": _Frozen(parameters)}


class _Frozen(dict):
    """A dict that can be part of a frozen Case."""

    def __hash__(self) -> int:
        return hash(tuple(self.items()))


def _plain_rope(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, rope=RopeConfig(theta=spec.rope.theta))


def _no_windows(spec: DecoderSpec) -> DecoderSpec:
    return replace(spec, windows=(None,) * spec.num_layers)


CASES = {
    "llama": _case("llama", lambda spec: replace(spec, rope=RopeConfig(theta=500.0))),
    "llama_o_bias": _case("llama", lambda spec: replace(spec, o_bias=False), attention_bias=True),
    "llama_qkv_bias": _case("llama", lambda spec: replace(spec, qkv_bias=False), attention_bias=True),
    "llama_mlp_bias": _case("llama", lambda spec: replace(spec, mlp_bias=False), mlp_bias=True),
    "llama_tied": _case("llama", lambda spec: replace(spec, tie_embeddings=False), tie_word_embeddings=True),
    "llama_eps": _case("llama", lambda spec: replace(spec, norm_eps=1e-6), rms_norm_eps=1e-2),
    "llama_wide_heads": _case("llama", None, head_dim=32, num_attention_heads=3, hidden_size=48, num_key_value_heads=1),
    "rope_linear": _case("llama", _plain_rope, **_rope(rope_type="linear", factor=4.0)),
    "rope_dynamic": _case("llama", None, **_rope(rope_type="dynamic", factor=4.0)),
    "rope_llama3": _case(
        "llama",
        _plain_rope,
        **_rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "rope_yarn": _case(
        "llama", _plain_rope, **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "rope_yarn_mscale": _case(
        "qwen2",
        lambda spec: replace(spec, rope=replace_rope(spec.rope, mscale=None)),
        **_rope(
            rope_type="yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            mscale=1.4,
            mscale_all_dim=0.7,
            beta_fast=16.0,
            beta_slow=2.0,
        ),
    ),
    "rope_yarn_untruncated": _case(
        "llama",
        lambda spec: replace(spec, rope=replace_rope(spec.rope, truncate=True)),
        **_rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=32, truncate=False),
    ),
    "rope_yarn_attention_factor": _case(
        "llama",
        lambda spec: replace(spec, rope=replace_rope(spec.rope, attention_factor=None)),
        **_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.3),
    ),
    "mistral": _case("mistral"),
    "mistral_window": _case("mistral", _no_windows, sliding_window=24),
    "qwen2": _case("qwen2", lambda spec: replace(spec, qkv_bias=False)),
    "qwen2_max_window_layers": _case(
        "qwen2", _no_windows, use_sliding_window=True, sliding_window=20, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen2_layer_types": _case(
        "qwen2",
        lambda spec: replace(spec, windows=(None, 20, 20)),
        use_sliding_window=True,
        sliding_window=20,
        num_hidden_layers=3,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    ),
    "qwen2_window_unused": _case("qwen2", None, use_sliding_window=False, sliding_window=20, max_window_layers=0),
    "qwen2_tied": _case("qwen2", lambda spec: replace(spec, tie_embeddings=False), tie_word_embeddings=True),
    "qwen3": _case("qwen3", lambda spec: replace(spec, qk_norm=False)),
    "qwen3_bias": _case("qwen3", lambda spec: replace(spec, o_bias=False), attention_bias=True),
    "qwen3_window": _case("qwen3", _no_windows, use_sliding_window=True, sliding_window=12, max_window_layers=1),
}


def replace_rope(rope: RopeConfig, **changes: Any) -> RopeConfig:
    import msgspec

    return msgspec.structs.replace(rope, **changes)


@dataclass(frozen=True)
class Expected:
    spec: DecoderSpec
    tensors: dict[str, Tensor]
    ids: Tensor
    logits: Tensor
    decoder: Decoder


@cache
def _expected(name: str) -> Expected:
    from transformers import AutoModelForCausalLM

    case = CASES[name]
    with TemporaryDirectory() as temporary:
        directory = write_tiny_model(Path(temporary), case.family, tokenizer=False, **dict(case.overrides))
        model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        tensors = {k: v.clone() for k, v in load_file(directory / "model.safetensors").items()}
        spec = spec_in(directory)
    ids = torch.randint(3, 400, (PROMPT + DECODED,), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        logits = model(ids[None]).logits[0].float()
    assert float(logits.std()) >= 1
    return Expected(spec, tensors, ids, logits, decoder_from(spec, tensors))


def _difference(got: Tensor, expected: Tensor) -> float:
    """Largest difference as a fraction of the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", CASES)
def test_prefill_then_decode(name: str) -> None:
    case = _expected(name)
    got = run_one(case.decoder, case.ids, decode_from=PROMPT)
    assert _difference(got, case.logits) < BOUND


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.without is not None])
def test_without_its_feature_it_fails(name: str) -> None:
    case = _expected(name)
    without = CASES[name].without
    assert without is not None
    decoder = decoder_from(without(case.spec), case.tensors)
    assert _difference(run_one(decoder, case.ids), case.logits) > 10 * BOUND


def test_without_grouping_of_heads_it_fails() -> None:
    case = _expected("llama")

    def interleaved(q: Tensor, kv: Tensor, *rest: Any) -> Tensor:
        order = torch.tensor([0, 2, 1, 3])
        return paged_attention(q[:, order], kv, *rest)[:, order]

    kernels = replace(cpu_kernels(), paged_attention=interleaved)
    decoder = decoder_from(case.spec, case.tensors, kernels)
    assert _difference(run_one(decoder, case.ids), case.logits) > 10 * BOUND


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2_max_window_layers", "qwen3"])
def test_chunks_and_page_sizes(name: str, chunk: int, page_size: int) -> None:
    case = _expected(name)
    got = run_one(case.decoder, case.ids, chunk=chunk, decode_from=PROMPT, page_size=page_size)
    assert _difference(got, case.logits) < BOUND


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3_window"])
def test_ragged_mixed_batches(name: str, page_size: int) -> None:
    case = _expected(name)
    runner = PagedRunner(case.decoder, page_size, 6 * 80 + 8)
    contexts = [runner.context(80) for _ in range(6)]
    # Rows start at different times and advance by different amounts: chunks, drafts and decodes side by side.
    plan = [[7, 0, 30, 1, 0, 64], [1, 5, 3, 1, 0, 1], [1, 5, 1, 1, 9, 1], [7, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    for sizes in plan:
        active = [(c, case.ids[c.length : c.length + n]) for c, n in zip(contexts, sizes, strict=True) if n]
        starts = [context.length for context, _ in active]
        for start, (_, ids), got in zip(starts, active, runner.step(active), strict=True):
            assert _difference(got, case.logits[start : start + len(ids)]) < BOUND


def test_embeddings_as_inputs() -> None:
    case = _expected("qwen3")
    runner = PagedRunner(case.decoder, 16, 16)
    rows = case.tensors["model.embed_tokens.weight"][case.ids]
    (got,) = runner.step([(runner.context(len(rows)), case.ids)], embeddings=rows)
    assert _difference(got, case.logits) < BOUND


def test_max_position_shortens_the_rotary_table_only() -> None:
    case = _expected("rope_yarn")
    decoder = decoder_from(case.spec, case.tensors, max_position=80)
    assert torch.equal(run_one(decoder, case.ids), run_one(case.decoder, case.ids))
