"""The table of hot operations and their implementations, and the one choice among them at start-up."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cpu.matrix import PackedLinear, PackedMatrix
from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from kernels.noise import SAMPLE
from kernels.rotary import NEOX, RotaryStyle


class SampleKernel(Protocol):
    """The signature of `kernels.sampling.sample`."""

    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        needs_filter: bool,
        all_greedy: bool,
        purpose: int = SAMPLE,
    ) -> Tensor: ...


class ProcessKernel(Protocol):
    """The signature of `kernels.logprobs.processed_logits`."""

    def __call__(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, *, needs_filter: bool
    ) -> Tensor: ...


class RopeStoreKernel(Protocol):
    """The signature of `kernels.rope_store.rope_store`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        cos_sin_cache: Tensor,
        kv: Tensor,
        locations: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        style: RotaryStyle = NEOX,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> None: ...


class AttentionKernel(Protocol):
    """The signature of `kernels.attention.paged_attention`."""

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor: ...


@dataclass(frozen=True)
class KernelSet:
    """The chosen implementation of each operation; each torch reference documents shapes and meaning."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rms_norm_quantised: Callable[[Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    add_rms_norm_quantised: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    gelu_and_mul: Callable[[Tensor], Tensor]
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    rope_store: RopeStoreKernel
    paged_attention: AttentionKernel
    gather_pages: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
    page_lists: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    compact_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    embed: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gated_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    packed_embed: Callable[[PackedMatrix, Tensor], Tensor]
    packed_linear: Callable[[PackedLinear, Tensor], Tensor]
    packed_gated_linear: Callable[[PackedLinear, Tensor], Tensor]
    quantise_rows: Callable[[Tensor], Tensor]
    norm_rows: Callable[[Tensor, Tensor, float], Tensor]
    add_norm_rows: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    sample: SampleKernel
    argmax_rows: Callable[[Tensor], Tensor]
    advance: Callable[[Tensor, Tensor, Tensor], None]
    adjust_logits: Callable[[Tensor, Tensor, PenaltyTable, EditTable, AdjustedRows], None]
    mask_logits: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    processed_logits: ProcessKernel
    score_tokens: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Target:
    """What an implementation is chosen for. `capability` is (major, minor) on CUDA and (0, 0) elsewhere."""

    device_type: str
    dtype: torch.dtype
    capability: tuple[int, int] = (0, 0)
    packed: bool = False
    """The weights are packed and the library of CPU kernels is there."""


@dataclass(frozen=True)
class Implementation:
    """One way to do an operation: `path` is `module:function`, imported only when chosen."""

    name: str
    path: str
    serves: Callable[[Target], bool]


def _anywhere(target: Target) -> bool:
    return True


def _packed_cpu(target: Target) -> bool:
    return target.device_type == "cpu" and target.packed


def _native(path: str) -> Implementation:
    return Implementation("native", path, _packed_cpu)


def _torch(path: str) -> Implementation:
    return Implementation("torch", path, _anywhere)


FORWARD_OPS = (
    "rms_norm",
    "add_rms_norm",
    "rope_store",
    "paged_attention",
    "packed_embed",
    "packed_linear",
    "packed_gated_linear",
    "quantise_rows",
    "norm_rows",
    "add_norm_rows",
    "argmax_rows",
)
"""What a forward pass over packed weights calls: if all are native, it can be recorded (kernels.cpu.program)."""


# Per operation, best first: the first whose predicate holds is taken. A new implementation is one line here.
IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = MappingProxyType(
    {
        "rms_norm": (_native("kernels.cpu.norm:rms_norm"), _torch("kernels.norm:rms_norm")),
        "add_rms_norm": (_native("kernels.cpu.norm:add_rms_norm"), _torch("kernels.norm:add_rms_norm")),
        "rms_norm_quantised": (_torch("kernels.norm:rms_norm_quantised"),),
        "add_rms_norm_quantised": (_torch("kernels.norm:add_rms_norm_quantised"),),
        "silu_and_mul": (_torch("kernels.activation:silu_and_mul"),),
        "gelu_and_mul": (_torch("kernels.activation:gelu_and_mul"),),
        "gelu_tanh_and_mul": (_torch("kernels.activation:gelu_tanh_and_mul"),),
        "rope_store": (_native("kernels.cpu.rotary:rope_store"), _torch("kernels.rope_store:rope_store")),
        "paged_attention": (
            _native("kernels.cpu.attention:paged_attention"),
            _torch("kernels.attention:paged_attention"),
        ),
        "gather_pages": (_torch("kernels.pages:gather_pages"),),
        "page_lists": (_torch("kernels.pages:page_lists"),),
        "compact_kv": (_torch("kernels.pages:compact_kv"),),
        "embed": (_torch("kernels.linear:embed"),),
        "linear": (_torch("kernels.linear:linear"),),
        "gated_linear": (_torch("kernels.linear:gated_linear"),),
        "packed_embed": (_native("kernels.cpu.linear:packed_embed"), _torch("kernels.packed:packed_embed")),
        "packed_linear": (_native("kernels.cpu.linear:packed_linear"), _torch("kernels.packed:packed_linear")),
        "packed_gated_linear": (
            _native("kernels.cpu.linear:packed_gated_linear"),
            _torch("kernels.packed:packed_gated_linear"),
        ),
        "quantise_rows": (_native("kernels.cpu.linear:quantise_rows"), _torch("kernels.packed:quantise_rows")),
        "norm_rows": (_native("kernels.cpu.norm:norm_rows"), _torch("kernels.packed:norm_rows")),
        "add_norm_rows": (_native("kernels.cpu.norm:add_norm_rows"), _torch("kernels.packed:add_norm_rows")),
        "sample": (_native("kernels.cpu.sampling:sample"), _torch("kernels.sampling:sample")),
        "argmax_rows": (_native("kernels.cpu.sampling:argmax_rows"), _torch("kernels.sampling:argmax_rows")),
        "advance": (_native("kernels.cpu.sampling:advance"), _torch("kernels.sampling:advance")),
        "adjust_logits": (_torch("kernels.logits:adjust_logits"),),
        "mask_logits": (_torch("kernels.logits:mask_logits"),),
        "processed_logits": (_torch("kernels.logprobs:processed_logits"),),
        "score_tokens": (_native("kernels.cpu.logprobs:score_tokens"), _torch("kernels.logprobs:score_tokens")),
    }
)


def select(
    device_type: str,
    dtype: torch.dtype,
    overrides: str | None = None,
    table: Mapping[str, tuple[Implementation, ...]] = IMPLEMENTATIONS,
    *,
    packed: bool = False,
) -> KernelSet:
    """Choose every operation's implementation for a device type ("cpu", "cuda") and a model dtype.

    packed: the weights are packed, for the library of CPU kernels.
    overrides: `op=impl,...`; None reads the environment variable ENGINE_KERNELS. Raises ValueError, with the list of
    what there is, for an unknown operation or implementation and for one that does not serve this device and dtype.
    """
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else (0, 0)
    target = Target(device_type, dtype, capability, packed)
    wanted = _parse(os.environ.get("ENGINE_KERNELS", "") if overrides is None else overrides, table)
    chosen = {f.name: _import(_choose(f.name, table[f.name], target, wanted.get(f.name))) for f in fields(KernelSet)}
    return KernelSet(**chosen)


def knows_int8_pages(kernels: KernelSet) -> bool:
    """Whether pages may be int8: codes with their scales are a matter of the CPU kernels."""
    return all(_is_native(kernels, op) for op in ("rope_store", "paged_attention"))


def can_record(kernels: KernelSet) -> bool:
    """Whether a forward pass over packed weights runs by recordable operations alone."""
    return all(_is_native(kernels, op) for op in FORWARD_OPS)


def _is_native(kernels: KernelSet, op: str) -> bool:
    return getattr(kernels, op).__module__.startswith("kernels.cpu.")


def _parse(overrides: str, table: Mapping[str, tuple[Implementation, ...]]) -> dict[str, str]:
    wanted: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in overrides.split(","))):
        op, equals, name = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"ENGINE_KERNELS: {item!r} is not of the form op=impl; ops: {', '.join(table)}")
        if op not in table:
            raise ValueError(f"ENGINE_KERNELS: unknown op {op!r}; ops: {', '.join(table)}")
        names = [implementation.name for implementation in table[op]]
        if name not in names:
            raise ValueError(f"ENGINE_KERNELS: op {op} has no implementation {name!r}; it has: {', '.join(names)}")
        wanted[op] = name
    return wanted


def _choose(op: str, implementations: tuple[Implementation, ...], target: Target, wanted: str | None) -> Implementation:
    serving = [implementation for implementation in implementations if implementation.serves(target)]
    for implementation in serving:
        if wanted in (None, implementation.name):
            return implementation
    what = f"ENGINE_KERNELS: implementation {wanted!r} of op {op}" if wanted else f"op {op}"
    names = ", ".join(implementation.name for implementation in serving) or "none"
    raise ValueError(f"{what} does not serve {target.device_type} with {target.dtype}; what does: {names}")


def _import(implementation: Implementation) -> Any:
    module, _, function = implementation.path.partition(":")
    return getattr(importlib.import_module(module), function)
