"""The table of what implements each operation, and for which targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

import torch


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
    is_made: bool = False
    """The path names a class: the function is an instance of it, made with a device's Context."""


_CUDA_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def _anywhere(target: Target) -> bool:
    return True


def _packed_cpu(target: Target) -> bool:
    return target.device_type == "cpu" and target.packed


def _cuda_device(target: Target) -> bool:
    return target.device_type == "cuda" and target.capability >= (8, 0) and target.dtype in _CUDA_TYPES


def _flashinfer_device(target: Target) -> bool:
    # Asked for, not imported: that takes seconds.
    return _cuda_device(target) and target.dtype != torch.float32 and find_spec("flashinfer") is not None


def _ways(function: str, reference: str, *, native: str = "", triton: str = "") -> tuple[Implementation, ...]:
    """Implementations that are all called `function`, by the modules they are in; best first, the reference last."""
    found = []
    if native:
        found.append(Implementation("native", f"kernels.cpu.{native}:{function}", _packed_cpu))
    if triton:
        found.append(Implementation("triton", f"kernels.cuda.{triton}:{function}", _cuda_device))
    return (*found, Implementation("torch", f"kernels.{reference}:{function}", _anywhere))


def _made_triton(path: str) -> Implementation:
    return Implementation("triton", f"kernels.cuda.{path}", _cuda_device, is_made=True)


def _fixed(path: str, *, is_made: bool = False) -> Implementation:
    """What computes a token's result in one order, whatever else is in the step."""
    return Implementation("fixed", f"kernels.cuda.{path}", _cuda_device, is_made)


# Per operation, best first: the first whose predicate holds is taken. A new implementation is one entry here.
IMPLEMENTATIONS: Mapping[str, tuple[Implementation, ...]] = MappingProxyType(
    {
        "rms_norm": _ways("rms_norm", "norm", native="norm", triton="norm"),
        "add_rms_norm": _ways("add_rms_norm", "norm", native="norm", triton="norm"),
        "rms_norm_quantised": _ways("rms_norm_quantised", "norm", triton="norm"),
        "add_rms_norm_quantised": _ways("add_rms_norm_quantised", "norm", triton="norm"),
        "silu_and_mul": _ways("silu_and_mul", "activation", triton="activation"),
        "gelu_and_mul": _ways("gelu_and_mul", "activation", triton="activation"),
        "gelu_tanh_and_mul": _ways("gelu_tanh_and_mul", "activation", triton="activation"),
        "rope_store": _ways("rope_store", "rope_store", native="rotary", triton="rope_store"),
        "paged_attention": (
            Implementation("fastest", "kernels.flashinfer.fastest:FastestAttention", _flashinfer_device, is_made=True),
            _made_triton("attention:PagedAttention"),
            _fixed("fixed_attention:FixedAttention", is_made=True),
            *_ways("paged_attention", "attention", native="attention"),
        ),
        "gather_pages": _ways("gather_pages", "pages", triton="pages"),
        "page_lists": _ways("page_lists", "pages", triton="pages"),
        "compact_kv": _ways("compact_kv", "pages", triton="pages"),
        "embed": _ways("embed", "linear", triton="embedding"),
        "linear": (_made_triton("linear:Linear"), _fixed("fixed_linear:linear"), *_ways("linear", "linear")),
        "gated_linear": (
            _made_triton("linear:GatedLinear"),
            _fixed("fixed_linear:gated_linear"),
            *_ways("gated_linear", "linear"),
        ),
        "packed_embed": _ways("packed_embed", "packed", native="linear"),
        "packed_linear": _ways("packed_linear", "packed", native="linear"),
        "packed_gated_linear": _ways("packed_gated_linear", "packed", native="linear"),
        "quantise_rows": _ways("quantise_rows", "packed", native="linear"),
        "norm_rows": _ways("norm_rows", "packed", native="norm"),
        "add_norm_rows": _ways("add_norm_rows", "packed", native="norm"),
        "concat": _ways("concat", "rows", native="rows"),
        "add_rows": _ways("add_rows", "rows", native="rows"),
        "step_inputs": _ways("step_inputs", "step", triton="step"),
        "sample": _ways("sample", "sampling", native="sampling", triton="sampling"),
        "argmax_rows": _ways("argmax_rows", "sampling", native="sampling", triton="sampling"),
        "advance": _ways("advance", "sampling", native="sampling", triton="sampling"),
        "advance_ends": _ways("advance_ends", "step", triton="step"),
        "verify_inputs": _ways("verify_inputs", "speculative", triton="speculative"),
        "take_accepted": _ways("take_accepted", "speculative", triton="speculative"),
        "moves_of": _ways("moves_of", "speculative", triton="speculative"),
        "draft_places": _ways("draft_places", "places", triton="places"),
        "append_tokens": _ways("append_tokens", "speculative", triton="speculative"),
        "ngram_drafts": _ways("ngram_drafts", "speculative", triton="speculative"),
        "ngram_tree": _ways("ngram_tree", "ngram", triton="ngram"),
        **{
            name: _ways(name, "beams", triton="beams")
            for name in ("likeliest", "grow", "best", "features_before", "keep_features")
        },
        "adjust_logits": _ways("adjust_logits", "logits", triton="logits"),
        "mask_logits": _ways("mask_logits", "logits", triton="logits"),
        "processed_logits": _ways("processed_logits", "logprobs", triton="logprobs"),
        "score_tokens": _ways("score_tokens", "logprobs", native="logprobs", triton="logprobs"),
    }
)
