"""Paged attention: decode, prefill, and many rows over one prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, SharedPrefix
from kernels.cuda.attention import PagedAttention
from kernels.cuda.attention_config import decode_configs, prefill_configs
from kernels.cuda.context import Context
from kernels.cuda.tuning import Key, Tuner
from kernels.dispatch import KernelSet
from kernels.flashinfer.planned import PlannedDecode, PlannedPrefill
from kernels.flashinfer.xqa import XqaDecode
from tools.kernel_bench.case import Case
from tools.kernel_bench.measure import copies_past_cache
from tools.kernel_bench.shapes import Shape

Attention = Callable[[Tensor, Tensor, AttentionBatch, AttentionSpec], Tensor]


class _Forced(Tuner):
    """Takes one configuration wherever there is one of its name."""

    def __init__(self, name: str) -> None:
        super().__init__(torch.device("cpu"), None)
        self._name = name

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        return self._name if self._name in candidates else default


def decode_ways(kernels: KernelSet, context: Context, shape: Shape, *, all_configs: bool) -> dict[str, Attention]:
    """The engine's choice, and what it chooses among as far as it is installed."""
    ways: dict[str, Attention] = {"engine": kernels.paged_attention, "triton": PagedAttention(context)}
    if all_configs:
        ways |= _forced(context, decode_configs(shape.head_dim, 2))
    if find_spec("flashinfer") is not None:
        ways |= {"flashinfer XQA": XqaDecode(context), "flashinfer fa2": PlannedDecode(context)}
    return ways


def prefill_ways(kernels: KernelSet, context: Context, shape: Shape, *, all_configs: bool) -> dict[str, Attention]:
    """The same for prompts."""
    ways: dict[str, Attention] = {"engine": kernels.paged_attention, "triton": PagedAttention(context)}
    if all_configs:
        ways |= _forced(context, prefill_configs(shape.head_dim, 2))
    if find_spec("flashinfer") is not None:
        ways["flashinfer"] = PlannedPrefill(context)
    return ways


def _forced(context: Context, names: Iterable[str]) -> dict[str, Attention]:
    return {f"triton {name}": PagedAttention(replace(context, tuner=_Forced(name))) for name in names}


@dataclass(frozen=True)
class Inputs:
    """Of one call."""

    q: Tensor
    kv: Tensor
    batch: AttentionBatch


def decode_cases(
    ways: Mapping[str, Attention],
    shape: Shape,
    batch: int,
    page_size: int,
    context: int = 1024,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Case]:
    """One new token for each row, all contexts of one length; pages in random order."""
    size = _kv_bytes(shape, kv_dtype) * batch * context + 2 * 2 * batch * shape.num_heads * shape.head_dim
    spec = AttentionSpec(shape.head_dim**-0.5)
    sets = [_inputs(shape, [1] * batch, [context] * batch, page_size, kv_dtype) for _ in range(_copies(size))]
    what = f"decode {batch} x {context}, page {page_size}"
    if kv_dtype != torch.bfloat16:
        what += f", {str(kv_dtype).removeprefix('torch.')}"
    flops = 4 * batch * context * shape.num_heads * shape.head_dim
    yield Case("attention", shape.name, what, size, flops, _calls(ways, sets, spec))


def prefill_cases(ways: Mapping[str, Attention], shape: Shape, lengths: list[int], page_size: int) -> Iterator[Case]:
    """Whole prompts, causal."""
    spec = AttentionSpec(shape.head_dim**-0.5)
    total = sum(lengths)
    size = (_kv_bytes(shape, torch.bfloat16) + 2 * 2 * shape.num_heads * shape.head_dim) * total
    flops = sum(4 * n * (n + 1) // 2 * shape.num_heads * shape.head_dim for n in lengths)
    sets = [_inputs(shape, lengths, lengths, page_size, torch.bfloat16) for _ in range(2)]
    what = f"prefill {len(lengths)} x {lengths[0]}, page {page_size}"
    yield Case("attention", shape.name, what, size, flops, _calls(ways, sets, spec))


def shared_cases(
    ways: Mapping[str, Attention], shape: Shape, batch: int, prefix: int, own: int, page_size: int
) -> Iterator[Case]:
    """Decode of rows that share a prefix, with the hint and without it."""
    spec = AttentionSpec(shape.head_dim**-0.5)
    context = prefix + own
    size = _kv_bytes(shape, torch.bfloat16) * (prefix + batch * own)
    flops = 4 * batch * context * shape.num_heads * shape.head_dim
    plain = [_inputs(shape, [1] * batch, [context] * batch, page_size, torch.bfloat16, prefix) for _ in range(2)]
    hint = SharedPrefix(np.array([0, batch], np.int32), np.array([prefix], np.int32))
    hinted = [replace(own, batch=replace(own.batch, prefix=hint)) for own in plain]
    calls = _calls(ways, plain, spec)
    calls |= {f"{way}, hinted": found for way, found in _calls(ways, hinted, spec).items()}
    what = f"decode {batch} x ({prefix} shared + {own}), page {page_size}"
    yield Case("attention", shape.name, what, size, flops, calls)


def _calls(ways: Mapping[str, Attention], sets: list[Inputs], spec: AttentionSpec) -> dict:
    return {
        # A batch of its own for each way: implementations keep what they chose in it.
        way: [partial(attend, own.q, own.kv, replace(own.batch), spec) for own in sets]
        for way, attend in ways.items()
    }


def _copies(size_bytes: int) -> int:
    return copies_past_cache(size_bytes, most=16)


def _kv_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Of one token in one layer."""
    return 2 * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _inputs(
    shape: Shape, q_lens: list[int], kv_lens: list[int], page_size: int, kv_dtype: torch.dtype, shared: int = 0
) -> Inputs:
    """Random keys and values in pages of random order; the first `shared` tokens of all rows are the same pages."""
    widths = [-(-length // page_size) for length in kv_lens]
    common = shared // page_size
    num_pages = common + sum(width - common for width in widths)
    kv = torch.randn(
        num_pages, 2, page_size, shape.num_kv_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16
    ).to(kv_dtype)
    q = torch.randn(sum(q_lens), shape.num_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    order = torch.randperm(num_pages, device="cuda", dtype=torch.int32)
    table = torch.zeros(len(widths), max(widths), device="cuda", dtype=torch.int32)
    table[:, :common] = order[:common]
    begin = common
    for row, width in enumerate(widths):
        table[row, common:width] = order[begin : begin + width - common]
        begin += width - common
    lens = torch.tensor(kv_lens, device="cuda")
    batch = AttentionBatch(
        np.array(q_lens, np.int32), lens, max(kv_lens), table, page_size, host_kv_lens=np.array(kv_lens, np.int32)
    )
    return Inputs(q, kv, batch)
