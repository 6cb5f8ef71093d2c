"""Choosing a token per row by the CPU kernels; see kernels/sampling.py for what they do."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.abi import ArgmaxArgs, SampleArgs
from kernels.cpu.native import emit, empty, loaded
from kernels.noise import SAMPLE


def argmax_rows(logits: Tensor) -> Tensor:
    """`kernels.sampling.argmax_rows` of float32 `[rows, vocab]` with any row stride."""
    logits = with_dense_rows(logits)
    num_rows, vocab = logits.shape
    tokens = empty(num_rows, dtype=torch.int32)
    emit(ArgmaxArgs(logits.data_ptr(), vocab, logits.stride(0), tokens.data_ptr()), num_rows, num_rows)
    return tokens


def sample(
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
) -> Tensor:
    """`kernels.sampling.sample` of float32 `[rows, vocab]` with any row stride."""
    if all_greedy:
        return argmax_rows(logits)
    logits = with_dense_rows(logits)
    num_rows, vocab = logits.shape
    # Held here until the op has run: some may be copies.
    floats = [dense(values, torch.float32) for values in (temperature, top_p, min_p)]
    limits, streams, places = dense(top_k, torch.int32), dense(seeds, torch.int64), dense(positions, torch.int64)
    tokens = empty(num_rows, dtype=torch.int32)
    args = SampleArgs(
        logits=logits.data_ptr(),
        vocab=vocab,
        stride=logits.stride(0),
        temperature=floats[0].data_ptr(),
        top_k=limits.data_ptr(),
        top_p=floats[1].data_ptr(),
        min_p=floats[2].data_ptr(),
        seeds=streams.data_ptr(),
        positions=places.data_ptr(),
        needs_filter=needs_filter,
        purpose=purpose,
        tokens=tokens.data_ptr(),
    )
    emit(args, num_rows, num_rows)
    return tokens


def with_dense_rows(logits: Tensor) -> Tensor:
    """The logits as float32 `[rows, vocab]` whose rows' elements lie side by side; a copy only if they do not."""
    logits = logits.to(torch.float32)
    return logits if logits.stride(1) == 1 else logits.contiguous()


def dense(values: Tensor, dtype: torch.dtype) -> Tensor:
    """A vector as one of another dtype whose elements lie side by side; a copy only if need be."""
    return values.to(dtype).contiguous()


def advance(last_token: Tensor, rows: Tensor, drawn: Tensor) -> None:
    """`kernels.sampling.advance`; all three dense."""
    loaded().engine_cpu_advance(last_token.data_ptr(), rows.data_ptr(), drawn.data_ptr(), drawn.shape[0])
