"""Paged attention in Triton; see kernels/attention.py for what it does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec, TreeMask
from kernels.cuda.attention_config import (
    TileConfig,
    decode_configs,
    draft_configs,
    kernel_constants,
    padded,
    prefill_configs,
)
from kernels.cuda.attention_kernel import REST, SHARED, attend
from kernels.cuda.attention_plan import DECODE, DRAFT, PREFILL, Launch, Plan, make_plan, tile_lanes
from kernels.cuda.context import NUM_TICKETS, Context, is_capturing
from kernels.cuda.pdl import is_wanted

MIN_SAVED = 4096
"""Keys, over all rows, from which going through shared ones in a launch of their own is worth it."""

MAX_HEAD_DIM = 256

LEAST_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on every device from compute capability 8.0 on."""
LARGE_HEADS_BYTES = 160 * 1024
"""What the usual tiles for heads of more than 128 elements need, rounded up."""

_LOG2E = 1.4426950408889634
# Splits are cut finer than fills the device only up to so many programs a multiprocessor: most of them find no work.
_MAX_PROGRAMS = 4
# Multiprocessors to plan for where there is no device to ask.
_SOME_MULTIPROCESSORS = 8


@dataclass(frozen=True, eq=False)
class _Call:
    """What all launches of one call are given."""

    q: Tensor
    kv: Tensor
    batch: AttentionBatch
    spec: AttentionSpec
    table: Tensor
    out: Tensor
    lse: Tensor | None
    shared_out: Tensor | None
    shared_lse: Tensor | None
    """What SHARED writes and REST reads: float32 of the shapes of out and lse."""

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.kv.shape[3]


@dataclass(frozen=True, eq=False)
class _Variant:
    """A way to do a launch."""

    config: TileConfig
    constants: dict[str, int | bool | str]
    want: int
    """How many splits of a row would fill the device."""
    splits: int
    """How many there can be."""
    min_tiles: int
    max_tiles: int
    """Tiles of keys of a split, as far as the number of splits allows."""


class PagedAttention:
    """`kernels.attention.paged_attention`: one launch for a batch of one kind of rows, up to three for a mixed one.

    Rows split among programs are put together by the last of them, always in the same order. Lengths of contexts stay
    on the device. Where rows share a prefix, its keys are gone through once for all of them.

    A batch whose rows have different numbers of tokens, or share a prefix, has a list copied to the device at its
    first call, which must not be amid the capture of a graph; later calls with the same batch may be. One with
    q_starts or a common prefix may always be: that is read on the device.
    """

    def __init__(self, context: Context, splits: int | None = None, min_saved: int | None = MIN_SAVED) -> None:
        """splits: into how many parts contexts are split, where they are long enough; None: as many as suit the step.
        min_saved: keys to be saved for shared ones to be treated apart; None: they never are.
        """
        self._context = context
        self._splits = splits
        self._min_saved = min_saved
        # What a graph reads must live as long as it may be replayed.
        self._plans_of_graphs: dict[int, Plan] = {}
        self._multiprocessors, self._shared_bytes = _SOME_MULTIPROCESSORS, LEAST_SHARED_BYTES
        if context.device.type == "cuda":
            properties = torch.cuda.get_device_properties(context.device)
            self._multiprocessors = properties.multi_processor_count
            self._shared_bytes = properties.shared_memory_per_block_optin

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        num_tokens, num_heads, head_dim = q.shape
        assert kv.stride(4) == 1 and num_heads % kv.shape[3] == 0 and kv.shape[2] == batch.page_size
        assert spec.scale > 0.0 and spec.k_scale > 0.0, "the largest score is taken before the scale"
        assert head_dim <= MAX_HEAD_DIM, f"heads have at most {MAX_HEAD_DIM} elements here, not {head_dim}"
        assert batch.kv_lens.is_contiguous() and (spec.sinks is None or spec.sinks.is_contiguous()), "must be dense"
        if q.stride(2) != 1:
            q = q.contiguous()
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
        # Windows leave little of a prefix, and where they begin differs among rows.
        may_share = (batch.prefix is not None or batch.common is not None) and spec.window is None
        plan = self._plan(batch, num_tokens, num_heads // kv.shape[3], q.dtype == torch.float32, may_share)
        if plan is None:
            return out
        shared_out = shared_lse = None
        if plan.shares:
            shared_out = torch.empty(out.shape, dtype=torch.float32, device=q.device)
            shared_lse = torch.empty(out.shape[:2], dtype=torch.float32, device=q.device)
        dense_lse = (
            lse if lse is None or lse.is_contiguous() else torch.empty(lse.shape, dtype=lse.dtype, device=lse.device)
        )
        call = _Call(q, kv, batch, spec, _dense_table(batch), out, dense_lse, shared_out, shared_lse)
        for launch in plan.launches:
            self._run(call, launch, self._variant(call, launch))
        if lse is not None and dense_lse is not None and dense_lse is not lse:
            lse.copy_(dense_lse)
        return out

    def _plan(
        self, batch: AttentionBatch, num_tokens: int, group: int, is_float32: bool, may_share: bool
    ) -> Plan | None:
        lanes = self._lanes_of_kind(group, is_float32)
        key = ("cuda attention plan", group, lanes, may_share)
        if key not in batch.memo:
            assert int(batch.q_lens.sum()) == num_tokens, "the rows' tokens are not those of q"
            batch.memo[key] = make_plan(batch, group, lanes, self._min_saved if may_share else None)
        plan = batch.memo[key]
        assert plan is None or isinstance(plan, Plan)
        if plan is not None and plan.has_lists and is_capturing(batch.kv_lens.device):
            self._plans_of_graphs[id(plan)] = plan
        return plan

    def _variant(self, call: _Call, launch: Launch) -> _Variant:
        """How to do a launch: what the tuner finds, asked once for a step and a kind of layer."""
        q, kv, window = call.q, call.kv, call.spec.window
        memo_key = (launch, q.shape[1:], kv.shape[3], q.dtype, kv.dtype, window, call.spec.softcap is None)
        known = call.batch.memo.get(memo_key)
        if isinstance(known, _Variant):
            return known
        op, configs = self._candidates(launch, padded(q.shape[2]), 4 if q.dtype == torch.float32 else kv.element_size())
        variants = {name: self._make_variant(call, launch, config) for name, config in configs.items()}
        name = next(iter(configs))
        if self._splits is None:
            # Prompts fill the device with few rows: which loop suits them depends on how many tokens they add.
            is_prompt = launch.kind == PREFILL
            rows, max_keys = (1, 1) if is_prompt else (launch.num_tiles, launch.max_keys)
            key = (
                *(str(q.dtype), str(kv.dtype), q.shape[1], q.shape[2], kv.shape[3], call.batch.page_size),
                *(launch.lanes, launch.part, int(call.batch.tree is not None), window or 0),
                *(int(call.spec.softcap is not None), int(call.spec.sinks is not None), int(call.lse is not None)),
                *(_row_class(rows), triton.next_power_of_2(launch.q_len), triton.next_power_of_2(max_keys)),
            )
            calls = {name: partial(self._run, call, launch, variant) for name, variant in variants.items()}
            name = self._context.tuner.choose(op, key, calls, name)
        call.batch.memo[memo_key] = variants[name]
        return variants[name]

    def _lanes_of_kind(self, group: int, is_float32: bool) -> tuple[int, ...]:
        return tile_lanes(group, is_float32)

    def _candidates(self, launch: Launch, head_dim: int, itemsize: int) -> tuple[str, dict[str, TileConfig]]:
        """What the choice is called, and the configurations it is among; the first is the default."""
        if launch.kind == DECODE:
            return "decode_attention", decode_configs(head_dim, itemsize)
        if launch.kind == DRAFT:
            return "draft_attention", self._fitting(draft_configs(head_dim, itemsize), head_dim)
        return "prefill_attention", self._fitting(prefill_configs(head_dim, itemsize), head_dim)

    def _fitting(self, configs: dict[str, TileConfig], head_dim: int) -> dict[str, TileConfig]:
        """Those for large heads need more shared memory than other devices than Hopper have, but for the frugal one."""
        if head_dim <= 128 or self._shared_bytes >= LARGE_HEADS_BYTES:
            return configs
        return {name: config for name, config in configs.items() if name == "frugal"} or configs

    def _make_variant(self, call: _Call, launch: Launch, config: TileConfig) -> _Variant:
        want, splits = self._num_splits(launch, config, call.kv.shape[3], call.spec.window)
        constants = kernel_constants(
            config,
            group=call.group,
            head_dim=call.q.shape[2],
            page_size=call.batch.page_size,
            lanes=launch.lanes,
            part=launch.part,
            # Matters only for parts that are merged; else, and for rows of all lengths, one kernel does for all.
            longest=launch.q_len if splits > 1 and not launch.is_ragged else launch.lanes,
            is_float32=call.q.dtype == torch.float32,
            has_tree=call.batch.tree is not None and launch.part != SHARED,
            has_window=call.spec.window is not None,
            has_softcap=call.spec.softcap is not None,
        )
        if self._splits is not None:
            return _Variant(config, constants, want, splits, 1, 1 << 30)
        return _Variant(
            config,
            constants,
            want,
            splits,
            max(1, config.min_split // config.block_n),
            max(1, config.max_split // config.block_n),
        )

    def _run(self, call: _Call, launch: Launch, variant: _Variant) -> None:
        q, kv, spec, batch = call.q, call.kv, call.spec, call.batch
        num_kv_heads, splits, constants = kv.shape[3], variant.splits, variant.constants
        scratch = None
        if splits > 1:
            size = int(constants["USED"]) * (int(constants["WIDTH"]) + 1)
            scratch = torch.empty(num_kv_heads * launch.num_tiles * splits * size, dtype=torch.float32, device=q.device)
        shared = launch.part == SHARED
        table = batch.common.page_table if shared and batch.common is not None else call.table
        visible, depths = (None, None) if batch.tree is None or shared else _tree_arrays(batch.tree)
        score_scale, cap = _score_factors(spec)
        pdl = is_wanted(q)
        kernel: Any = attend[(num_kv_heads, launch.num_tiles, splits)]
        kernel(
            q,
            kv,
            call.shared_out if shared else call.out,
            call.shared_lse if shared else call.lse,
            None if shared else spec.sinks,
            table,
            batch.kv_lens,
            launch.tiles,
            visible,
            depths,
            call.shared_out if launch.part == REST else None,
            call.shared_lse if launch.part == REST else None,
            scratch,
            None if scratch is None else self._context.tickets,
            q.stride(0),
            q.stride(1),
            kv.stride(0),
            kv.stride(1),
            kv.stride(2),
            kv.stride(3),
            table.stride(0),
            0 if visible is None else visible.stride(0),
            score_scale,
            cap,
            1.0 if shared else spec.v_scale,
            spec.window or 0,
            launch.q_len,
            variant.want,
            variant.min_tiles,
            variant.max_tiles,
            **constants,
            PDL=pdl,
            num_warps=variant.config.num_warps,
            num_stages=variant.config.num_stages,
            launch_pdl=pdl,
        )

    def _num_splits(self, launch: Launch, config: TileConfig, num_kv_heads: int, window: int | None) -> tuple[int, int]:
        """How many splits of a row fill the device, and how many there can be."""
        programs = launch.num_tiles * num_kv_heads
        if programs > NUM_TICKETS:
            return 1, 1
        if self._splits is not None:
            return self._splits, self._splits
        keys = launch.max_keys if window is None else min(launch.max_keys, window + launch.q_len)
        want = max(1, min(config.programs * self._multiprocessors // programs, keys // config.min_split))
        limit = min(-(-keys // config.max_split), _MAX_PROGRAMS * self._multiprocessors // programs)
        return want, max(want, limit)


def _row_class(rows: int) -> int:
    """How many rows share a choice, the largest of them: what suits 64 rows, which fill the device, suits 40 badly."""
    octave = triton.next_power_of_2(rows)
    by = max(octave // 8, min(octave, 8))
    return -(-rows // by) * by


def _score_factors(spec: AttentionSpec) -> tuple[float, float]:
    """(score_scale, cap) of the kernel, whose scores are in powers of two.

    With a softcap, cap * tanh(x) is computed from exp(2 x).
    """
    scale = spec.scale * spec.k_scale
    if spec.softcap is None:
        return scale * _LOG2E, 0.0
    return 2.0 * _LOG2E * scale / spec.softcap, spec.softcap * _LOG2E


def _tree_arrays(tree: TreeMask) -> tuple[Tensor, Tensor]:
    assert tree.visible.stride(1) == 1 and tree.depths.stride(0) == 1
    assert tree.visible.shape[0] * tree.visible.stride(0) < 1 << 31, "places in the mask are 32 bits wide"
    return tree.visible.view(torch.uint8), tree.depths


def _dense_table(batch: AttentionBatch) -> Tensor:
    table = batch.page_table
    if table.stride(1) == 1 or table.shape[1] <= 1:
        return table
    key = "cuda page table"
    known = batch.memo.get(key)
    # A graph must hold the copying itself: it runs again when the table has changed.
    if is_capturing(table.device) or not isinstance(known, Tensor):
        known = table.contiguous()
        batch.memo[key] = known
    return known
