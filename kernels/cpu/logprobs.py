"""Log probabilities of tokens by the CPU kernels; see kernels/logprobs.py for what they do."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.cpu.abi import ScoreArgs
from kernels.cpu.native import emit, empty
from kernels.cpu.sampling import dense, with_dense_rows


def score_tokens(logits: Tensor, tokens: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.logprobs.score_tokens` of float32 `[rows, vocab]` with any row stride.

    The ids beside a row that holds a NaN are the first ones.
    """
    logits, tokens = with_dense_rows(logits), dense(tokens, torch.int64)
    num_rows, vocab = logits.shape
    chosen = empty(num_rows)
    ids, tops = empty(num_rows, width, dtype=torch.int64), empty(num_rows, width)
    outputs = (chosen.data_ptr(), ids.data_ptr(), tops.data_ptr())
    emit(ScoreArgs(logits.data_ptr(), vocab, logits.stride(0), tokens.data_ptr(), width, *outputs), num_rows, num_rows)
    return chosen, ids, tops
