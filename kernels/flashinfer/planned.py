"""FlashInfer's planned kernels, fa2 and fa3: the host divides a step's work, then every layer runs by that plan."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cuda.context import Context
from kernels.flashinfer.arguments import PageLists, host_rows
from kernels.flashinfer.library import FlashInfer, Planned, capability, flashinfer
from kernels.flashinfer.takes import CAUSAL, Takes
from kernels.pages import page_lists as torch_page_lists

_WORKSPACE_BYTES = 256 << 20
_HOPPER = 9
_MOST_SLOTS = 4


@dataclass(frozen=True)
class PlanKey:
    """What a plan is made for besides the rows; layers that agree in it share one."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None
    softcap: float | None
    q_dtype: torch.dtype
    kv_dtype: torch.dtype

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """As `plan` takes them."""
        return self.num_heads, self.num_kv_heads, self.head_dim, self.page_size

    @property
    def options(self) -> dict[str, object]:
        """The rest of it, by `plan`'s names."""
        return {
            "sm_scale": self.scale,
            # FlashInfer counts the tokens seen before the query itself, -1 for all.
            "window_left": -1 if self.window is None else self.window - 1,
            "logits_soft_cap": self.softcap,
            "q_data_type": self.q_dtype,
            "kv_data_type": self.kv_dtype,
        }


@dataclass(eq=False)
class _Slot:
    """A wrapper object, which holds one plan at a time."""

    wrapper: Planned
    owner: weakref.ref[AttentionBatch] | None = None
    """The step whose plan it holds."""
    copied: torch.cuda.Event | None = None
    """Passed when the device has that plan: the wrapper writes plans into one pinned buffer."""


class _Plans:
    """The plans of one kind of wrapper. Steps that are alive at the same time have slots of their own."""

    def __init__(
        self,
        device: torch.device,
        make: Callable[[PlanKey], Planned],
        plan: Callable[[Planned, PlanKey, AttentionBatch], None],
    ) -> None:
        self._device = device
        self._make = make
        self._plan = plan
        self._slots: defaultdict[PlanKey, list[_Slot]] = defaultdict(list)

    def of(self, key: PlanKey, batch: AttentionBatch) -> Planned:
        """A wrapper that holds the plan for this step; planned at the first layer that asks."""
        memo_key = (self, key)
        slot = batch.memo.get(memo_key)
        if not isinstance(slot, _Slot):
            slot = self._free_slot(key)
            if slot.copied is not None:
                slot.copied.synchronize()
            self._plan(slot.wrapper, key, batch)
            if self._device.type == "cuda":
                slot.copied = torch.cuda.Event()
                slot.copied.record(torch.cuda.current_stream(self._device))
            slot.owner = weakref.ref(batch)
            batch.memo[memo_key] = slot
        return slot.wrapper

    def _free_slot(self, key: PlanKey) -> _Slot:
        slots = self._slots[key]
        free = [slot for slot in slots if slot.owner is None or slot.owner() is None]
        # One whose plan the device has already, so that nobody waits for it.
        for slot in free:
            if slot.copied is None or slot.copied.query():
                return slot
        if free and len(slots) >= _MOST_SLOTS:
            return free[0]
        slots.append(_Slot(self._make(key)))
        return slots[-1]


class _PlannedAttention(ABC):
    """What both have in common. `takes` and `name` are theirs."""

    name: str
    takes: Takes

    def __init__(
        self, context: Context, library: FlashInfer | None = None, page_lists: PageLists = torch_page_lists
    ) -> None:
        """library: stands in for the module; page_lists: an implementation of `kernels.pages.page_lists`. Raises
        ValueError where FlashInfer is not installed.
        """
        self._library = library or flashinfer()
        self._page_lists = page_lists
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=context.device)
        self._plans = _Plans(context.device, self._make, self._plan)

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        """As `kernels.attention.paged_attention`; raises ValueError for what `takes` does not say."""
        if q.shape[0] == 0:
            return torch.empty_like(q)
        self.takes.check(self.name, q, kv, batch, spec, lse)
        assert q.stride(2) == 1 and kv.stride(4) == 1
        rows = host_rows(batch, self._page_lists)
        if rows.pages.shape[0] == 0:
            if lse is not None:
                lse.fill_(-math.inf)
            return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        key = PlanKey(
            q.shape[1],
            kv.shape[3],
            q.shape[2],
            batch.page_size,
            spec.scale,
            spec.window,
            spec.softcap,
            q.dtype,
            kv.dtype,
        )
        wrapper = self._plans.of(key, batch)
        out = (torch.empty if rows.empty_tokens is None else torch.zeros)(q.shape, dtype=q.dtype, device=q.device)
        wants_lse = lse is not None or spec.sinks is not None
        # Scales other than None cost a pass over the result, or a division: None where there is nothing to scale.
        scales = {
            "k_scale": None if spec.k_scale == 1.0 else spec.k_scale,
            "v_scale": None if spec.v_scale == 1.0 else spec.v_scale,
        }
        if not wants_lse:
            wrapper.run(q, kv, out=out, enable_pdl=False, **scales)
            return out
        own_lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float32, device=q.device)
        wrapper.run(q, kv, out=out, lse=own_lse, return_lse=True, enable_pdl=False, **scales)
        # FlashInfer's is the logarithm to base 2.
        own_lse *= math.log(2.0)
        if rows.empty_tokens is not None:
            # There it leaves the number that its maxima start from.
            own_lse.masked_fill_(rows.empty_tokens.unsqueeze(1), -math.inf)
        if spec.sinks is not None:
            # exp(lse) / (exp(lse) + exp(sink)), 0 for a row without context.
            out *= torch.sigmoid(own_lse - spec.sinks).unsqueeze(-1)
        if lse is not None:
            lse.copy_(own_lse)
        return out

    @abstractmethod
    def _make(self, key: PlanKey) -> Planned:
        """A wrapper object without a plan."""

    @abstractmethod
    def _plan(self, wrapper: Planned, key: PlanKey, batch: AttentionBatch) -> None:
        """Give a wrapper object the plan of a step."""


class PlannedPrefill(_PlannedAttention):
    """`paged_attention` for rows that add any numbers of tokens: by fa3 on Hopper, by fa2 elsewhere and where pages are
    of fp8. With a window, keys and values shortly before it are read and weighted with 0: no NaN may be there.
    """

    name = "FlashInfer's prefill"
    takes = Takes(
        page_sizes=None,
        ragged=True,
        masks=frozenset({CAUSAL}),
        lse=True,
        kv_dtypes=frozenset({torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}),
        head_dims=frozenset({64, 128, 256}),
        needs_host_lengths=True,
        cuda_graph=False,
        softcap=True,
    )

    def _make(self, key: PlanKey) -> Planned:
        on_hopper = capability(self._workspace.device)[0] == _HOPPER
        backend = "fa3" if on_hopper and key.kv_dtype == key.q_dtype else "fa2"
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)

    def _plan(self, wrapper: Planned, key: PlanKey, batch: AttentionBatch) -> None:
        rows = host_rows(batch, self._page_lists)
        wrapper.plan(
            rows.q_starts,
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            *key.sizes,
            causal=True,
            **key.options,
        )


class PlannedDecode(_PlannedAttention):
    """`paged_attention` for rows that add one token each, by fa2 on tensor cores. For windows see PlannedPrefill."""

    name = "FlashInfer's decode"
    takes = replace(PlannedPrefill.takes, ragged=False, max_q_len=1)

    def _make(self, key: PlanKey) -> Planned:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True, backend="fa2"
        )

    def _plan(self, wrapper: Planned, key: PlanKey, batch: AttentionBatch) -> None:
        rows = host_rows(batch, self._page_lists)
        wrapper.plan(
            rows.page_starts,
            rows.pages,
            rows.last_page_lens,
            *key.sizes,
            **key.options,
        )
