"""Decoding by FlashInfer's XQA kernels: page tables and lengths are read on the device, nothing is planned."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.cuda.context import Context
from kernels.flashinfer.arguments import device_rows, packed_mask
from kernels.flashinfer.library import FlashInfer, capability, flashinfer
from kernels.flashinfer.takes import CAUSAL, HALVES, TREE, Takes, uniform_q_len

# Where parts of rows meet. Rows are divided only while there are fewer of them than multiprocessors, so there are no
# more parts than those, times the blocks of 32 query heads that drafted tokens make: 17 MiB at most on an H200.
_SCRATCH_BYTES = 64 << 20
_NUM_SEMAPHORES = 1 << 16
# The value from which the kernels take maxima. As a sink's score it is nothing beside any real score, and all there is
# in a row without context: it makes such a row's result 0 / 1 where several parts of it meet, not 0 / 0.
_NO_SINK = -1e5
_MAX_HEADS = 1 << 10


class XqaDecode:
    """`paged_attention` for rows that add one token each, or a few drafted ones, the same number in every row.

    With a window, up to 255 tokens before it are read and weighted with 0: they must not hold NaN or infinities. One
    launch, two if q is not dense.
    """

    takes = Takes(
        page_sizes=frozenset({16, 32, 64, 128}),
        ragged=False,
        masks=frozenset({CAUSAL, TREE}),
        lse=False,
        kv_dtypes=HALVES,
        head_dims=frozenset({64, 128, 256}),
        needs_host_lengths=False,
        cuda_graph=True,
        softcap=False,
        max_q_len=32,
        windowed_q_len=1,
        max_group=32,
        aligned_heads=True,
    )

    def __init__(self, context: Context, library: FlashInfer | None = None) -> None:
        """library: stands in for the module. Raises ValueError where FlashInfer or the device does not have XQA."""
        device = context.device
        if device.type == "cuda" and capability(device)[0] not in (9, 10, 12):
            raise ValueError(f"XQA does not run on compute capability {capability(device)}")
        self._xqa = (library or flashinfer()).xqa
        # Counters of its own: what its kernels leave in them is not ours to promise to others.
        self._semaphores = torch.zeros(_NUM_SEMAPHORES, dtype=torch.int32, device=device)
        self._scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._no_sinks = torch.full((_MAX_HEADS,), _NO_SINK, dtype=torch.float32, device=device)

    def __call__(
        self, q: Tensor, kv: Tensor, batch: AttentionBatch, spec: AttentionSpec, lse: Tensor | None = None
    ) -> Tensor:
        """As `kernels.attention.paged_attention`; raises ValueError for what `takes` does not say."""
        num_tokens, num_heads, head_dim = q.shape
        if num_tokens == 0:
            return torch.empty_like(q)
        self.takes.check("XQA", q, kv, batch, spec, lse)
        assert num_heads <= _MAX_HEADS
        q_len = uniform_q_len(batch)
        assert q_len is not None
        num_kv_heads = kv.shape[3]
        rows = num_tokens // q_len
        on_device = device_rows(batch)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        sinks = spec.sinks
        if sinks is None:
            sinks = self._no_sinks[:num_heads]
        beam = (rows, 1, num_heads, head_dim) if q_len == 1 else (rows, 1, q_len, num_heads, head_dim)
        keys, values = kv.unbind(1)
        self._xqa(
            # Only addresses of queries, lengths, tables and masks are taken, not strides and not types.
            q.contiguous().view(beam),
            keys,
            values,
            on_device.page_table,
            on_device.kv_lens.unsqueeze(1),
            out.view(beam),
            self._scratch,
            self._semaphores,
            num_kv_heads,
            batch.page_size,
            sinks=sinks.view(num_kv_heads, -1),
            # The kernels scale by 1 / sqrt(head_dim) themselves.
            q_scale=spec.scale * spec.k_scale * head_dim**0.5,
            sliding_win_size=spec.window or 0,
            kv_layout="NHD",
            enable_pdl=False,
            q_seq_len=q_len,
            mask=None if q_len == 1 else packed_mask(batch, q_len),
        )
        return out
