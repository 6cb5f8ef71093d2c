"""Whole decoders by the CUDA kernels, against the torch references in float32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.dispatch import KernelSet, select
from kernels.implementations import IMPLEMENTATIONS
from tests.support.tiny_models import write_tiny_model
from tests.unit.models.paging import PagedRunner, decoder_from, run_one, spec_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192}),
    "llama_odd_head": ("llama", {"head_dim": 80, "num_attention_heads": 4, "num_key_value_heads": 4}),
    "qwen2": ("qwen2", {"head_dim": 64}),
    "qwen3": ("qwen3", {"head_dim": 128, "hidden_size": 256}),
    "mistral_window": ("mistral", {"head_dim": 64, "sliding_window": 24}),
}


@pytest.fixture(scope="module")
def kernels() -> dict[torch.dtype, KernelSet]:
    return {dtype: select("cuda", dtype, "") for dtype in (torch.float32, torch.bfloat16)}


def _divergence(expected: Tensor, got: Tensor) -> float:
    """The largest Kullback-Leibler divergence of a token's distribution."""
    wanted, found = expected.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).max())


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", MODELS)
def test_like_the_references(name: str, page_size: int, kernels: dict[torch.dtype, KernelSet], tmp_path: Path) -> None:
    family, overrides = MODELS[name]
    directory = write_tiny_model(tmp_path, family, tokenizer=False, **overrides)
    spec, tensors = spec_in(directory), load_file(directory / "model.safetensors")
    ids = torch.randint(0, spec.vocab_size, (100,), generator=torch.Generator().manual_seed(1))
    expected = run_one(decoder_from(spec, tensors), ids)
    wide = decoder_from(spec, tensors, kernels[torch.float32], device="cuda")
    for chunk, decode_from in ((None, None), (33, 90)):
        got = run_one(wide, ids, page_size=page_size, chunk=chunk, decode_from=decode_from).cpu()
        assert _divergence(expected, got) < 1e-6
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    expected = run_one(decoder_from(spec, rounded), ids)
    short = decoder_from(spec, rounded, kernels[torch.bfloat16], device="cuda", dtype=torch.bfloat16)
    for chunk, decode_from in ((None, None), (33, 90)):
        got = run_one(short, ids, page_size=page_size, chunk=chunk, decode_from=decode_from).cpu()
        # Models with random weights round more than trained ones: their residuals do not grow.
        assert _divergence(expected, got) < 2e-2


def test_neighbours(kernels: dict[torch.dtype, KernelSet], tmp_path: Path) -> None:
    """Prompts beside rows that decode, in one step."""
    directory = write_tiny_model(tmp_path, "llama", tokenizer=False, head_dim=64)
    spec, tensors = spec_in(directory), load_file(directory / "model.safetensors")
    gen = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, spec.vocab_size, (length,), generator=gen) for length in (40, 7, 90, 1)]
    logits = []
    for place, chosen in (("cpu", None), ("cuda", kernels[torch.float32])):
        runner = PagedRunner(decoder_from(spec, tensors, chosen, device=place), 16, 64)
        contexts = [runner.context(len(prompt) + 4) for prompt in prompts]
        first = runner.step([(contexts[0], prompts[0]), (contexts[1], prompts[1])])
        second = runner.step([(contexts[0], prompts[1][:1]), (contexts[1], prompts[0][:1]), (contexts[2], prompts[2])])
        third = runner.step([(contexts[3], prompts[3]), (contexts[2], prompts[0][:4])])
        logits.append(torch.cat([part.cpu() for part in (*first, *second, *third)]))
    assert _divergence(*logits) < 1e-6


def test_every_implementation_can_be_chosen() -> None:
    target_ops = [
        (op, implementation.name)
        for op, implementations in IMPLEMENTATIONS.items()
        for implementation in implementations
        if implementation.name != "native" and (implementation.name != "fastest" or _has_flashinfer())
    ]
    for op, name in target_ops:
        assert callable(getattr(select("cuda", torch.bfloat16, f"{op}={name}"), op))


def _has_flashinfer() -> bool:
    from importlib.util import find_spec

    return find_spec("flashinfer") is not None
