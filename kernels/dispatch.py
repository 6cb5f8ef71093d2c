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

from kernels.attention import AttentionBatch
from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from kernels.noise import SAMPLE


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


@dataclass(frozen=True)
class KernelSet:
    """The chosen implementation of each operation; each torch reference documents shapes and meaning."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    silu_and_mul: Callable[[Tensor], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    write_kv: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[[Tensor, Tensor, AttentionBatch, float, int | None], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    sample: SampleKernel
    argmax_rows: Callable[[Tensor], Tensor]
    adjust_logits: Callable[[Tensor, Tensor, PenaltyTable, EditTable, AdjustedRows], None]
    processed_logits: ProcessKernel
    score_tokens: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Target:
    """What an implementation is chosen for. `capability` is (major, minor) on CUDA and (0, 0) elsewhere."""

    device_type: str
    dtype: torch.dtype
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Implementation:
    """One way to do an operation: `path` is `module:function`, imported only when chosen."""

    name: str
    path: str
    serves: Callable[[Target], bool]


def _anywhere(target: Target) -> bool:
    return True


# Per operation, best first: the first whose predicate holds is taken. A new implementation is one line here.
IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = MappingProxyType(
    {
        "rms_norm": (Implementation("torch", "kernels.norm:rms_norm", _anywhere),),
        "add_rms_norm": (Implementation("torch", "kernels.norm:add_rms_norm", _anywhere),),
        "silu_and_mul": (Implementation("torch", "kernels.activation:silu_and_mul", _anywhere),),
        "rope": (Implementation("torch", "kernels.rotary:rope", _anywhere),),
        "write_kv": (Implementation("torch", "kernels.kv_write:write_kv", _anywhere),),
        "paged_attention": (Implementation("torch", "kernels.attention:paged_attention", _anywhere),),
        "linear": (Implementation("torch", "kernels.linear:linear", _anywhere),),
        "sample": (Implementation("torch", "kernels.sampling:sample", _anywhere),),
        "argmax_rows": (Implementation("torch", "kernels.sampling:argmax_rows", _anywhere),),
        "adjust_logits": (Implementation("torch", "kernels.logits:adjust_logits", _anywhere),),
        "processed_logits": (Implementation("torch", "kernels.logprobs:processed_logits", _anywhere),),
        "score_tokens": (Implementation("torch", "kernels.logprobs:score_tokens", _anywhere),),
    }
)


def select(
    device_type: str,
    dtype: torch.dtype,
    overrides: str | None = None,
    table: Mapping[str, tuple[Implementation, ...]] = IMPLEMENTATIONS,
) -> KernelSet:
    """Choose every operation's implementation for a device type ("cpu", "cuda") and a model dtype.

    overrides: `op=impl,...`; None reads the environment variable ENGINE_KERNELS. Raises ValueError, with the list of
    what there is, for an unknown operation or implementation and for one that does not serve this device and dtype.
    """
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else (0, 0)
    target = Target(device_type, dtype, capability)
    wanted = _parse(os.environ.get("ENGINE_KERNELS", "") if overrides is None else overrides, table)
    chosen = {f.name: _import(_choose(f.name, table[f.name], target, wanted.get(f.name))) for f in fields(KernelSet)}
    return KernelSet(**chosen)


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
    what = f"implementation {wanted!r} of op {op}" if wanted else f"op {op}"
    names = ", ".join(implementation.name for implementation in serving) or "none"
    raise ValueError(f"{what} does not serve {target.device_type} with {target.dtype}; what does: {names}")


def _import(implementation: Implementation) -> Any:
    module, _, function = implementation.path.partition(":")
    return getattr(importlib.import_module(module), function)
