"""Stands in for the module `flashinfer`: does what its documentation says of its arguments, in plain float32 loops.

What an argument is not documented to say is poisoned or refused, so that a result is right only if the arguments are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    sees: Callable[[int, int], bool],
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Result of q `[q_len, heads, dim]` over keys `[ctx, kv_heads, dim]`, and the lse to base 2 without sinks."""
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
    group = q.shape[1] // keys.shape[1]
    for token in range(q.shape[0]):
        seen = [i for i in range(len(keys)) if sees(token, i)]
        for head in range(q.shape[1]):
            if not seen:
                continue
            scores = keys[seen, head // group].float() @ q[token, head].float() * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            lse[token, head] = scores.logsumexp(0) * LOG2_E
            total = scores.logsumexp(0)
            if sinks is not None:
                total = torch.logaddexp(total, sinks[head])
            out[token, head] = (scores - total).exp() @ values[seen, head // group].float()
    return out, lse


class FakeFlashInfer:
    def __init__(self) -> None:
        self.made: list[FakePlanned] = []
        self.xqa_calls: list[dict[str, object]] = []

    def xqa(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        output: Tensor,
        workspace_buffer: Tensor,
        semaphores: Tensor,
        num_kv_heads: int,
        page_size: int,
        *,
        sinks: Tensor | None,
        q_scale: float,
        sliding_win_size: int,
        kv_layout: str,
        enable_pdl: bool,
        q_seq_len: int,
        mask: Tensor | None,
    ) -> None:
        self.xqa_calls.append({"page_table": page_table, "seq_lens": seq_lens, "mask": mask, "sinks": sinks})
        assert kv_layout == "NHD" and not enable_pdl
        assert q.is_contiguous() and output.is_contiguous() and q.shape == output.shape
        assert page_table.dtype == torch.int32 and page_table.is_contiguous()
        assert seq_lens.dtype == torch.int32 and seq_lens.shape == (q.shape[0], 1)
        assert not semaphores.any() and workspace_buffer.is_contiguous()
        rows, head_dim = q.shape[0], q.shape[-1]
        scale = q_scale / math.sqrt(head_dim)
        for row in range(rows):
            length = int(seq_lens[row, 0])
            if length == 0:
                # Parts of a row meet: 0 / 0, but for what the sinks bring.
                output[row] = 0.0 if sinks is not None else math.nan
                continue
            pages = page_table[row, : -(-length // page_size)].tolist()
            keys = torch.cat([k_cache[page] for page in pages])[:length]
            values = torch.cat([v_cache[page] for page in pages])[:length]
            queries = q[row, 0].view(q_seq_len, -1, head_dim)

            def sees(token: int, i: int, row: int = row, length: int = length) -> bool:
                own = i - (length - q_seq_len)
                if sliding_win_size and i < length - sliding_win_size:
                    return False
                if mask is None:
                    return True
                return own < 0 or bool((int(mask[row, token, own // 32]) >> (own % 32)) & 1)

            assert (mask is None) == (q_seq_len == 1)
            out, _ = attend(queries, keys, values, sees, scale, sinks=None if sinks is None else sinks.reshape(-1))
            output[row, 0] = out.view(output[row, 0].shape)

    def BatchPrefillWithPagedKVCacheWrapper(self, workspace: Tensor, kv_layout: str, *, backend: str) -> FakePlanned:
        return self._make(workspace, kv_layout, backend, is_decode=False)

    def BatchDecodeWithPagedKVCacheWrapper(
        self, workspace: Tensor, kv_layout: str, *, use_tensor_cores: bool, backend: str
    ) -> FakePlanned:
        assert use_tensor_cores
        return self._make(workspace, kv_layout, backend, is_decode=True)

    def _make(self, workspace: Tensor, kv_layout: str, backend: str, is_decode: bool) -> FakePlanned:
        assert kv_layout == "NHD" and workspace.dtype == torch.uint8
        self.made.append(FakePlanned(backend, is_decode))
        return self.made[-1]


class FakePlanned:
    def __init__(self, backend: str, is_decode: bool) -> None:
        self.backend = backend
        self.is_decode = is_decode
        self.num_plans = 0

    def plan(self, *arguments: object, causal: bool = False, **options: object) -> None:
        self.num_plans += 1
        assert causal != self.is_decode
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if self.is_decode:
            tensors.insert(0, torch.arange(len(tensors[2]) + 1, dtype=torch.int32))
        self.q_starts, self.page_starts, self.pages, self.last_page_lens = tensors
        assert all(tensor.dtype == torch.int32 for tensor in tensors)
        assert len(self.pages) == self.page_starts[-1]
        self.sizes = arguments[-4:]
        self.options = options

    def run(
        self,
        q: Tensor,
        kv: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool,
        k_scale: float | None,
        v_scale: float | None,
    ) -> None:
        num_heads, num_kv_heads, head_dim, page_size = self.sizes
        assert (num_heads, num_kv_heads, head_dim) == (q.shape[1], kv.shape[3], q.shape[2])
        assert isinstance(page_size, int) and page_size == kv.shape[2]
        assert return_lse == (lse is not None) and not enable_pdl
        assert self.options["q_data_type"] == q.dtype and self.options["kv_data_type"] == kv.dtype
        scale, window, softcap = (self.options[name] for name in ("sm_scale", "window_left", "logits_soft_cap"))
        assert isinstance(scale, float) and isinstance(window, int)
        assert softcap is None or isinstance(softcap, float)
        for row in range(len(self.last_page_lens)):
            q_begin, q_end = self.q_starts[row : row + 2].tolist()
            begin, end = self.page_starts[row : row + 2].tolist()
            length = max(end - begin - 1, 0) * page_size + int(self.last_page_lens[row])
            if length == 0:
                continue
            pages = kv[self.pages[begin:end].long()].float()
            keys, values = pages.transpose(0, 1).reshape(2, -1, kv.shape[3], kv.shape[4])[:, :length]

            def sees(token: int, i: int, q_len: int = q_end - q_begin, length: int = length) -> bool:
                distance = length - q_len + token - i
                return distance >= 0 and (window < 0 or distance <= window)

            result, own_lse = attend(q[q_begin:q_end], keys, values, sees, scale * (k_scale or 1.0), softcap or 0.0)
            out[q_begin:q_end] = result * (v_scale or 1.0)
            if lse is not None:
                # Rows without context keep the number that maxima start from.
                lse[q_begin:q_end] = torch.where(own_lse.isneginf(), -5e4, own_lse)
