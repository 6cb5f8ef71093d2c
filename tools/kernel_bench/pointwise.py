"""Norms, rotary with the store of keys and values, gates, embedding, moving of KV."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels import activation, linear, norm, pages, rope_store
from kernels.dispatch import KernelSet
from tools.kernel_bench.case import Case, calls_of
from tools.kernel_bench.measure import copies_past_cache
from tools.kernel_bench.shapes import Shape

DTYPE = torch.bfloat16
EPS = 1e-6
PAGE_SIZE = 64


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


def norm_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    size = 2 * batch * shape.hidden
    copies = copies_past_cache(4 * size)
    weight = torch.ones(shape.hidden, device="cuda", dtype=DTYPE)
    inputs = [(_random(batch, shape.hidden), _random(batch, shape.hidden), weight, EPS) for _ in range(copies)]
    what = f"{batch} x {shape.hidden}"
    ways = {"engine": calls_of(kernels.add_rms_norm, inputs), "torch": calls_of(norm.add_rms_norm, inputs)}
    yield Case("add_rms_norm", shape.name, what, 4 * size, 0, ways)
    alone = [(x, weight, EPS) for x, *_ in inputs]
    ways = {"engine": calls_of(kernels.rms_norm, alone), "torch": calls_of(norm.rms_norm, alone)}
    yield Case("rms_norm", shape.name, what, 2 * size, 0, ways)
    eight_bits = [(*own, torch.float8_e4m3fn) for own in inputs]
    ways = {
        "engine": calls_of(kernels.add_rms_norm_quantised, eight_bits),
        "torch": calls_of(norm.add_rms_norm_quantised, eight_bits),
    }
    yield Case("add_rms_norm_quantised", shape.name, what, 3 * size + size // 2, 0, ways)


def gate_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    size = 2 * batch * shape.inner
    inputs = [(_random(batch, 2 * shape.inner),) for _ in range(copies_past_cache(3 * size))]
    ways = {"engine": calls_of(kernels.silu_and_mul, inputs), "torch": calls_of(activation.silu_and_mul, inputs)}
    yield Case("silu_and_mul", shape.name, f"{batch} x {shape.inner}", 3 * size, 0, ways)


def rope_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    dim = shape.head_dim
    size = 2 * batch * shape.qkv
    angles = torch.rand(8192, dim, device="cuda")
    weight = torch.ones(dim, device="cuda", dtype=DTYPE) if shape.qk_norm else None
    num_pages = -(-batch // PAGE_SIZE)
    inputs = []
    for _ in range(copies_past_cache(2 * size)):
        parts = _random(batch, shape.qkv).split([shape.num_heads * dim] + [shape.num_kv_heads * dim] * 2, dim=1)
        heads = [part.unflatten(1, (-1, dim)) for part in parts]
        kv = _random(num_pages, 2, PAGE_SIZE, shape.num_kv_heads, dim)
        positions = torch.randint(0, 8192, (batch,), device="cuda")
        locations = torch.randperm(num_pages * PAGE_SIZE, device="cuda")[:batch]
        inputs.append((*heads, positions, angles, kv, locations, weight, weight, EPS))
    ways = {"engine": calls_of(kernels.rope_store, inputs), "torch": calls_of(rope_store.rope_store, inputs)}
    yield Case("rope_store", shape.name, f"{batch} tokens", 2 * size + batch * 4 * dim, 0, ways)


def embed_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    size = 2 * batch * shape.hidden
    table = _random(shape.vocab, shape.hidden)
    inputs = [(table, torch.randint(0, shape.vocab, (batch,), device="cuda")) for _ in range(16)]
    ways = {"engine": calls_of(kernels.embed, inputs), "torch": calls_of(linear.embed, inputs)}
    yield Case("embed", shape.name, f"{batch} x {shape.hidden}", 2 * size, 0, ways)


def page_cases(kernels: KernelSet, shape: Shape, batch: int) -> Iterator[Case]:
    """A page table of contexts of up to 8,192 tokens; and 4 of 8 drafted tokens accepted in 8 layers."""
    width = 8192 // 16
    table = torch.randint(0, 1 << 20, (max(batch, 256), width), device="cuda", dtype=torch.int32)
    rows = torch.randperm(len(table), device="cuda")[:batch]
    kv_lens = torch.full((batch,), 1088, device="cuda")
    inputs = [(table, rows, kv_lens, 16, width)] * 4
    ways = {"engine": calls_of(kernels.gather_pages, inputs), "torch": calls_of(pages.gather_pages, inputs)}
    yield Case("gather_pages", shape.name, f"{batch} x {width}, 1088 tokens", batch * (4 * width + 4 * 68), 0, ways)
    layers, moved = 8, 4
    kv = _random(layers, -(-batch * 16 // PAGE_SIZE), 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
    starts = torch.arange(batch, device="cuda").unsqueeze(1) * 16
    targets = starts + torch.arange(8, device="cuda")
    sources = starts + torch.tensor([1, 3, 4, 7, 7, 7, 7, 7], device="cuda")
    counts = torch.full((batch,), moved, device="cuda")
    inputs = [(pages.KVLayers.of(kv.unbind()), sources, targets, counts)] * 4
    size = 2 * 2 * batch * moved * layers * 2 * shape.num_kv_heads * shape.head_dim
    ways = {"engine": calls_of(kernels.compact_kv, inputs), "torch": calls_of(pages.compact_kv, inputs)}
    yield Case("compact_kv", shape.name, f"{batch} x {moved} tokens, {layers} layers", size, 0, ways)
