"""One prompt, computed in many ways, for the tests of kernels whose results must not depend on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch, AttentionSpec
from kernels.dispatch import AttentionKernel
from scheduler_proc.models.decoder import Decoder
from tests.support.attention_cases import Case
from tests.unit.models.paging import PagedRunner, run_one

ASKED = "linear=fixed,gated_linear=fixed,paged_attention=fixed"
"""The kernels of fixed order, as overrides."""


def in_chunks(attention: AttentionKernel, case: Case, spec: AttentionSpec, chunk: int, first: int = 0) -> Tensor:
    """Results from token `first` on of a case of one row that is all prompt, `chunk` tokens a step.

    At each step what comes later is not in the pages yet.
    """
    ((num_tokens, _),) = case.rows
    kv = torch.full_like(case.kv, torch.nan)
    _copy_keys(case, kv, 0, first)
    results = []
    for start in range(first, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        _copy_keys(case, kv, start, end)
        results.append(attention(case.q[start:end], kv, _batch(case, [(end - start, end)]), spec))
    return torch.cat(results)


def among_others(
    attention: AttentionKernel, case: Case, spec: AttentionSpec, row: tuple[int, int], others: Sequence[tuple[int, int]]
) -> list[Tensor]:
    """Results of a row (q_len, kv_len) at the end of a prompt's first kv_len tokens, in each place among other such."""
    results = []
    for place in range(len(others) + 1):
        rows = [*others[:place], row, *others[place:]]
        q = torch.cat([case.q[kv_len - q_len : kv_len] for q_len, kv_len in rows])
        start = sum(q_len for q_len, _ in others[:place])
        results.append(attention(q, case.kv, _batch(case, rows), spec)[start : start + row[0]])
    return results


def logits_of_every_way(decoder: Decoder, ids: Tensor, decode_from: int) -> dict[str, Tensor]:
    """Logits of every token of a sequence: at once, in chunks, by pages of other sizes, decoded from a token on, and
    beside other sequences."""
    found = {"at once": run_one(decoder, ids), "in chunks": run_one(decoder, ids, chunk=7)}
    for page_size in (1, 64):
        decoded = run_one(decoder, ids, page_size=page_size, decode_from=decode_from)
        found[f"decoded, pages of {page_size}"] = decoded
    runner = PagedRunner(decoder, 16, 3 * (len(ids) // 16 + 1))
    ours, other, third = (runner.context(len(ids)) for _ in range(3))
    steps = [
        runner.step([(other, ids[2:5]), (ours, ids[:decode_from])])[1],
        runner.step([(ours, ids[decode_from:-1]), (other, ids[7:8]), (third, ids[3:9])])[0],
        runner.step([(third, ids[:1]), (ours, ids[-1:]), (other, ids[1:2])])[1],
    ]
    return {**found, "beside others": torch.cat(steps)}


def _batch(case: Case, rows: Sequence[tuple[int, int]]) -> AttentionBatch:
    return replace(
        case.batch,
        q_lens=np.array([q_len for q_len, _ in rows], dtype=np.int32),
        kv_lens=torch.tensor([kv_len for _, kv_len in rows], device=case.q.device),
        max_kv_len=max(kv_len for _, kv_len in rows),
        page_table=case.batch.page_table.expand(len(rows), -1),
    )


def _copy_keys(case: Case, kv: Tensor, start: int, end: int) -> None:
    """Of the prompt's tokens [start, end), keys and values."""
    page_size = case.batch.page_size
    places = torch.arange(start, end, device=kv.device)
    pages = case.batch.page_table[0, places // page_size].long()
    kv[pages, :, places % page_size] = case.kv[pages, :, places % page_size]
