"""Compiles the attention kernel as real layers launch it; run where kernels are not interpreted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kernels.cuda.attention_config import TileConfig, decode_configs, draft_configs, kernel_constants, prefill_configs
from kernels.cuda.attention_kernel import REST, SHARED, WHOLE, attend
from tests.support.triton_compile import Compiled, compile_kernel
from tests.unit.kernels.cuda.dependent import assert_waits

_POINTERS = {
    "table": "*i32",
    "kv_lens": "*i64",
    "tiles": "*i32",
    "visible": "*u8",
    "depths": "*i32",
    "shared_out": "*fp32",
    "shared_lse": "*fp32",
    "scratch": "*fp32",
    "tickets": "*i32",
    "lse": "*fp32",
    "sinks": "*fp32",
}
_STRIDES = ("q_token_stride", "q_head_stride", "page_stride", "half_stride", "token_stride", "head_stride")
_COUNTS = ("table_stride", "visible_stride", "window", "q_len", "want_splits", "min_tiles", "max_tiles")


@dataclass(frozen=True)
class Layer:
    """What a launch's constants follow from, beside its configuration."""

    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    lanes: int = 16
    longest: int = 1
    part: int = WHOLE
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    window: bool = False
    softcap: bool = False
    pdl: bool = False
    has: frozenset[str] = frozenset()
    """The pointers that are not None, of those that may be."""


def compile_layer(layer: Layer, config: TileConfig, capability: int = 90) -> Compiled:
    """One variant of the kernel."""
    constants: dict[str, object] = dict(
        kernel_constants(
            config,
            group=layer.group,
            head_dim=layer.head_dim,
            page_size=layer.page_size,
            lanes=layer.lanes,
            part=layer.part,
            longest=layer.longest,
            is_float32=layer.dtype == "fp32",
            has_tree="visible" in layer.has,
            has_window=layer.window,
            has_softcap=layer.softcap,
        )
    )
    out = "fp32" if layer.part == SHARED else layer.dtype
    types = {"q": f"*{layer.dtype}", "kv": f"*{layer.kv_dtype}", "out": f"*{out}"}
    types |= dict.fromkeys((*_STRIDES, *_COUNTS), "i32") | dict.fromkeys(("score_scale", "cap", "v_scale"), "fp32")
    has = layer.has | {"table", "kv_lens"}
    types |= {name: kind for name, kind in _POINTERS.items() if name in has}
    constants |= dict.fromkeys(_POINTERS.keys() - has) | {"PDL": layer.pdl}
    aligned = {"q", "kv", "out", "tiles", "shared_out", "shared_lse", "scratch", "tickets"} & types.keys()
    return compile_kernel(
        attend,
        types,
        constants,
        capability=capability,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=(*sorted(aligned), *_STRIDES),
    )


def compile_all() -> list[tuple[str, Compiled]]:
    """(name, result) of each variant."""
    split, many = frozenset({"scratch", "tickets"}), frozenset({"tiles"})
    tree, shared = frozenset({"visible", "depths"}), frozenset({"shared_out", "shared_lse"})
    cases: list[tuple[str, Layer, TileConfig, int]] = []

    def add(name: str, layer: Layer, config: TileConfig, capability: int = 90) -> None:
        cases.append((name, layer, config, capability))

    for name, config in decode_configs(128, 2).items():
        add(f"decode {name}", Layer(has=split), config)
    large, small = decode_configs(128, 2)["large"], decode_configs(128, 2)["small"]
    for page_size in (1, 64):
        add(f"decode page {page_size}", Layer(page_size=page_size, has=split), large)
    add("decode one split", Layer(), large)
    add("decode sm_80", Layer(has=split), large, 80)
    add("decode window softcap sinks lse", Layer(window=True, softcap=True, has=split | {"sinks", "lse"}), small)
    for name, config in decode_configs(64, 2).items():
        add(f"decode 64 {name}", Layer(3, 64, has=split), config)
    for name, config in decode_configs(256, 2).items():
        add(f"decode 256 {name}", Layer(8, 256, has=split), config)
    for name, config in decode_configs(128, 1).items():
        add(f"decode fp8 {name}", Layer(kv_dtype="fp8e4nv", has=split), config)
    add("decode fp32", Layer(dtype="fp32", kv_dtype="fp32", has=split), decode_configs(128, 4)["plain"])
    add("decode tree", Layer(longest=4, has=split | tree), large)
    add("decode shared", Layer(part=SHARED, longest=4, has=split | many | {"lse"}), large)
    add("decode rest", Layer(part=REST, has=split | many | shared), large)
    for head_dim, group in ((64, 3), (128, 4), (256, 8)):
        for name, config in draft_configs(head_dim, 2).items():
            layer = Layer(group, head_dim, lanes=64, longest=16, has=split | tree)
            add(f"draft {head_dim} {name}", layer, config)
        for name, config in prefill_configs(head_dim, 2).items():
            layer = Layer(group, head_dim, lanes=128, longest=4096, has=many)
            # "large" keeps a few registers in memory with 128; whether that pays is for the tuner to measure.
            if (head_dim, name) != (128, "large"):
                add(f"prefill {head_dim} {name}", layer, config)
    even = prefill_configs(128, 2)["even"]
    add("prefill sm_80", Layer(lanes=128, longest=4096), prefill_configs(128, 2)["small"], 80)
    add("prefill split", Layer(lanes=128, longest=4096, has=split), even)
    add("prefill window", Layer(lanes=128, longest=4096, window=True), even)
    add("prefill shared", Layer(part=SHARED, lanes=128, longest=4096, has=many | split | {"lse"}), even)
    add("prefill rest", Layer(part=REST, lanes=128, longest=4096, has=many | shared), even)
    add("draft fp8", Layer(lanes=64, longest=16, kv_dtype="fp8e4nv", has=split), draft_configs(128, 1)["even"])
    add("draft 256 fp8", Layer(8, 256, lanes=64, longest=8, kv_dtype="fp8e4nv"), draft_configs(256, 1)["even"])
    add("decode 256 fp8", Layer(8, 256, kv_dtype="fp8e5", has=split), decode_configs(256, 1)["large"])
    add("prefill fp8", Layer(lanes=128, longest=4096, kv_dtype="fp8e4nv"), prefill_configs(128, 1)["even"])
    fp32 = Layer(lanes=32, longest=4096, dtype="fp32", kv_dtype="fp32")
    add("prefill fp32", fp32, prefill_configs(128, 4)["plain"])
    add("draft fp32", Layer(lanes=32, longest=8, dtype="fp32", kv_dtype="fp32"), draft_configs(128, 4)["plain"])
    for name, layer, config, capability in cases[:]:
        if capability >= 90:
            add(f"{name} pdl", replace(layer, pdl=True), config)
    done = [(name, layer, compile_layer(layer, config, capability)) for name, layer, config, capability in cases]
    for name, layer, kernel in done:
        if layer.pdl:
            assert_waits(name, kernel.ptx)
    return [(name, kernel) for name, _, kernel in done]


if __name__ == "__main__":
    for case, result in compile_all():
        copies = result.ptx.count("cp.async.cg"), result.ptx.count("cp.async.ca")
        print(f"{case:34} {result.registers:4} {result.spilled_bytes:5} {result.shared_bytes:7} {copies}")
