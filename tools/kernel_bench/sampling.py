"""From logits to tokens and logprobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kernels import logits as logits_reference
from kernels import logprobs, sampling
from kernels.dispatch import KernelSet
from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from tools.kernel_bench.case import Case
from tools.kernel_bench.measure import Call, copies_past_cache
from tools.kernel_bench.shapes import Shape

Sample = Callable[..., Tensor]


def sample_cases(kernels: KernelSet, shape: Shape, batch: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[Case]:
    """Peaked logits are like a model's, where a few tokens have most of the mass; flat ones are normal noise."""
    size = batch * shape.vocab * dtype.itemsize
    copies = copies_past_cache(size, most=16)
    flat = [(torch.randn(batch, shape.vocab, device="cuda") * 2.5).to(dtype) for _ in range(copies)]
    peaked = [_peaked(batch, shape.vocab).to(dtype) for _ in range(copies)]
    what = f"{batch} x {shape.vocab} {str(dtype).removeprefix('torch.')}"
    ways: dict[str, list[Call]] = {
        "engine": [partial(kernels.argmax_rows, own) for own in peaked],
        "torch": [partial(sampling.argmax_rows, own) for own in peaked],
    }
    yield Case("argmax_rows", shape.name, what, size, 0, ways)
    kinds = {
        "temperature": (peaked, (0.8, -1, 1.0, 0.0)),
        "temperature, flat": (flat, (0.8, -1, 1.0, 0.0)),
        "top-k 50, top-p 0.9": (peaked, (0.8, 50, 0.9, 0.0)),
        "top-k 50, top-p 0.9, flat": (flat, (0.8, 50, 0.9, 0.0)),
        "top-p 0.95": (peaked, (0.8, -1, 0.95, 0.0)),
        "top-p 0.95, flat": (flat, (0.8, -1, 0.95, 0.0)),
        "min-p 0.05": (peaked, (0.8, -1, 1.0, 0.05)),
    }
    for kind, (logits, values) in kinds.items():
        parameters = _parameters(batch, *values)
        filters = {"needs_filter": not kind.startswith("temperature"), "all_greedy": False}

        def drawing(sample: Sample, own: Tensor, parameters: tuple = parameters, filters: dict = filters) -> Tensor:
            return sample(own, *parameters, **filters)

        ways = {
            "engine": [partial(drawing, kernels.sample, own) for own in logits],
            "torch": [partial(drawing, sampling.sample, own) for own in logits],
        }
        yield Case("sample", shape.name, f"{what}, {kind}", size, 0, ways)


def _peaked(batch: int, vocab: int) -> Tensor:
    """Probabilities that fall with the rank's power of -1.5, ranks in random order (Zipf's law)."""
    ranks = torch.arange(1, vocab + 1, device="cuda").log()
    return torch.stack([-1.5 * ranks[torch.randperm(vocab, device="cuda")] for _ in range(batch)])


def score_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    size = 2 * batch * shape.vocab
    logits = [
        torch.randn(batch, shape.vocab, device="cuda", dtype=torch.bfloat16)
        for _ in range(copies_past_cache(size, most=16))
    ]
    tokens = torch.randint(0, shape.vocab, (batch,), device="cuda")
    for width in (0, 5, 20):
        ways: dict[str, list[Call]] = {
            "engine": [partial(kernels.score_tokens, own, tokens, width) for own in logits],
            "torch": [partial(logprobs.score_tokens, own, tokens, width) for own in logits],
        }
        yield Case("score_tokens", shape.name, f"{batch} x {shape.vocab}, {width} beside", size, 0, ways)


def adjust_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    """All rows penalised, with 4 biases each; all rows masked. In place, so the same logits again and again."""
    entries = torch.arange(batch, device="cuda")
    ones = torch.ones(batch, device="cuda")
    penalties = PenaltyTable(
        ones,
        ones * 0.5,
        ones * 0.25,
        torch.rand(batch, shape.vocab, device="cuda") < 0.01,
        (torch.rand(batch, shape.vocab, device="cuda") < 0.01).int(),
    )
    edits = EditTable(
        torch.randint(0, shape.vocab, (batch, 4), device="cuda"),
        torch.zeros(batch, 4, device="cuda"),
        torch.zeros(batch, 1, device="cuda", dtype=torch.int64),
        torch.zeros(batch, device="cuda", dtype=torch.int64),
    )
    adjusted = AdjustedRows(entries, entries, entries, entries)
    logits = torch.randn(batch, shape.vocab, device="cuda")
    kv_lens = torch.full((batch,), 100, device="cuda")
    size = batch * shape.vocab
    inputs = (logits, kv_lens, penalties, edits, adjusted)
    # The torch reference waits for the device: it cannot be captured, so there is nothing to compare with.
    ways: dict[str, list[Call]] = {"engine": [partial(kernels.adjust_logits, *inputs)]}
    yield Case("adjust_logits", shape.name, f"{batch} x {shape.vocab} float32", size * (1 + 4), 0, ways)
    mask = torch.randint(-(1 << 31), (1 << 31) - 1, (batch, -(-shape.vocab // 32)), device="cuda", dtype=torch.int32)
    short = logits.to(torch.bfloat16)
    masked = (short, mask, entries, entries)
    ways = {
        "engine": [partial(kernels.mask_logits, *masked)],
        "torch": [partial(logits_reference.mask_logits, *masked)],
    }
    yield Case("mask_logits", shape.name, f"{batch} x {shape.vocab} bf16", size * 4, 0, ways)


def _parameters(batch: int, temperature: float, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, ...]:
    def rows(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((batch,), value, device="cuda", dtype=dtype)

    floats = torch.float32
    seeds = torch.randint(0, 1 << 62, (batch,), device="cuda")
    return (
        rows(temperature, floats),
        rows(top_k, torch.int32),
        rows(top_p, floats),
        rows(min_p, floats),
        seeds,
        rows(100, torch.int64),
    )
