"""The hot operations, and the one choice among their implementations at start-up."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.beams import Candidates, Frontier
from kernels.cpu.matrix import PackedLinear, PackedMatrix
from kernels.implementations import IMPLEMENTATIONS, Implementation, Target
from kernels.logits import AdjustedRows, EditTable, PenaltyTable
from kernels.ngram import NgramCorpus, NgramSearch
from kernels.noise import SAMPLE
from kernels.pages import KVLayers
from kernels.places import DraftPlaces, Passes
from kernels.rotary import NEOX, RotaryStyle
from kernels.speculative import Drafts, Nodes, Taken, VerifyLimits
from kernels.step import SlotTensors, StepInputs

if TYPE_CHECKING:
    from kernels.cuda.context import Context


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
    compact_kv: Callable[[KVLayers, Tensor, Tensor, Tensor], None]
    embed: Callable[[Tensor, Tensor], Tensor]
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gated_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    packed_embed: Callable[[PackedMatrix, Tensor], Tensor]
    packed_linear: Callable[[PackedLinear, Tensor], Tensor]
    packed_gated_linear: Callable[[PackedLinear, Tensor], Tensor]
    quantise_rows: Callable[[Tensor], Tensor]
    norm_rows: Callable[[Tensor, Tensor, float], Tensor]
    add_norm_rows: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    concat: Callable[[Sequence[Tensor]], Tensor]
    add_rows: Callable[[Tensor, Tensor], Tensor]
    step_inputs: Callable[[Tensor, Tensor | None, Tensor | None, SlotTensors, int, int, bool, StepInputs], None]
    sample: SampleKernel
    argmax_rows: Callable[[Tensor], Tensor]
    advance: Callable[[Tensor, Tensor, Tensor], None]
    advance_ends: Callable[[SlotTensors, Tensor, Tensor], None]
    verify_inputs: Callable[[Tensor, Drafts, SlotTensors, VerifyLimits, int, int, StepInputs], Nodes]
    take_accepted: Callable[[Tensor, Nodes, Tensor, SlotTensors, VerifyLimits], Taken]
    moves_of: Callable[[Tensor, Nodes, Taken, Tensor, int, int], tuple[Tensor, Tensor, Tensor]]
    draft_places: Callable[[Tensor, Passes, SlotTensors, VerifyLimits, int, int, int], DraftPlaces]
    append_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], None]
    ngram_drafts: Callable[[Tensor, Tensor, Tensor, int, int, int, int], Tensor]
    ngram_tree: Callable[[Tensor, Tensor, Tensor, int, NgramSearch, int, NgramCorpus | None], Drafts]
    likeliest: Callable[[Tensor, int, Tensor | None], tuple[Tensor, Tensor]]
    grow: Callable[[Tensor, Tensor, Candidates, Tensor, Frontier | None, int], Frontier]
    best: Callable[[Candidates, int], Drafts]
    features_before: Callable[[Tensor, Tensor | None, Tensor, Tensor | None, int], Tensor]
    keep_features: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Tensor, int, Tensor, Tensor], None]
    adjust_logits: Callable[[Tensor, Tensor, PenaltyTable, EditTable, AdjustedRows], None]
    mask_logits: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    processed_logits: ProcessKernel
    score_tokens: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


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
    "concat",
    "add_rows",
    "argmax_rows",
)
"""What passes over packed weights call, drafters' too: if all are native, they can be recorded, see
kernels.cpu.program."""


def select(
    device_type: str,
    dtype: torch.dtype,
    overrides: str | None = None,
    table: Mapping[str, tuple[Implementation, ...]] = IMPLEMENTATIONS,
    *,
    packed: bool = False,
    context: Context | None = None,
) -> KernelSet:
    """Choose every operation's implementation for a device type ("cpu", "cuda") and a model dtype.

    packed: the weights are packed, for the library of CPU kernels. context: what the CUDA kernels share; without one,
    they get a new one that keeps no choices on disk.
    overrides: `op=impl,...`; None reads the environment variable ENGINE_KERNELS. Raises ValueError, with the list of
    what there is, for an unknown operation or implementation and for one that does not serve this device and dtype.
    """
    capability = torch.cuda.get_device_capability() if device_type == "cuda" else (0, 0)
    target = Target(device_type, dtype, capability, packed)
    wanted = _parse(os.environ.get("ENGINE_KERNELS", "") if overrides is None else overrides, table)
    chosen = {f.name: _choose(f.name, table[f.name], target, wanted.get(f.name)) for f in fields(KernelSet)}
    if context is None and any(implementation.is_made for implementation in chosen.values()):
        context = _new_context(device_type)
    return KernelSet(**{op: _import(implementation, context) for op, implementation in chosen.items()})


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


def _import(implementation: Implementation, context: Context | None) -> Any:
    module, _, name = implementation.path.partition(":")
    found = getattr(importlib.import_module(module), name)
    return found(context) if implementation.is_made else found


def _new_context(device_type: str) -> Context:
    from kernels.cuda.context import make_context
    from kernels.cuda.tuning import Tuner

    device = torch.device(device_type)
    return make_context(device, Tuner(device, None))
