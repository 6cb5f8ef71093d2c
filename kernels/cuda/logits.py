"""Changing logits before a token is drawn; kernels/logits.py says how."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernels.logits import AdjustedRows, EditTable, PenaltyTable

_PENALISED_AT_ONCE = 2048
_WORDS_AT_ONCE = 64


def adjust_logits(
    logits: Tensor, kv_lens: Tensor, penalties: PenaltyTable, edits: EditTable, adjusted: AdjustedRows
) -> None:
    """`kernels.logits.adjust_logits`; the rows must be dense, and may have any stride; the tables dense.

    Biases of one token in one entry, if there are several, are added up before they are added to its logit.
    """
    vocab = logits.shape[1]
    assert logits.stride(1) == 1 or vocab == 1
    tables = (*vars(penalties).values(), *vars(edits).values(), *vars(adjusted).values(), kv_lens)
    assert all(table.is_contiguous() for table in tables), "tables and indices must be dense"
    num = len(adjusted.penalty_rows)
    if num:
        blocks = triton.cdiv(vocab, _PENALISED_AT_ONCE)
        penalise: Any = penalise_rows[(num * blocks,)]
        penalise(
            logits,
            logits.stride(0),
            vocab,
            penalties.repetition,
            penalties.presence,
            penalties.frequency,
            penalties.in_prompt,
            penalties.output_counts,
            adjusted.penalty_rows,
            adjusted.penalty_entries,
            BLOCK=_PENALISED_AT_ONCE,
            # The product with the frequency is rounded before it is subtracted.
            enable_fp_fusion=False,
        )
    num = len(adjusted.edit_rows)
    num_biases, num_ends = edits.bias_ids.shape[1], edits.end_ids.shape[1]
    if num and num_biases + num_ends:
        edit: Any = edit_rows[(num,)]
        edit(
            logits,
            logits.stride(0),
            kv_lens,
            edits.bias_ids,
            edits.bias_values,
            num_biases,
            edits.end_ids,
            edits.min_lens,
            num_ends,
            adjusted.edit_rows,
            adjusted.edit_entries,
            BLOCK=64,
            COMPARED=32,
        )


def mask_logits(logits: Tensor, bitmask: Tensor, rows: Tensor, entries: Tensor) -> None:
    """`kernels.logits.mask_logits`; the rows must be dense, and may have any stride, and so must the masks."""
    vocab = logits.shape[1]
    assert logits.stride(1) == 1 or vocab == 1
    assert bitmask.stride(1) == 1 or bitmask.shape[1] == 1
    assert rows.is_contiguous() and entries.is_contiguous(), "indices must be dense"
    num, blocks = len(rows), triton.cdiv(vocab, 32 * _WORDS_AT_ONCE)
    if num:
        kernel: Any = mask_rows[(num * blocks,)]
        kernel(logits, logits.stride(0), vocab, bitmask, bitmask.stride(0), rows, entries, WORDS=_WORDS_AT_ONCE)


@triton.jit
def penalise_rows(
    logits,
    stride,
    vocab,
    repetition,
    presence,
    frequency,
    in_prompt,
    output_counts,
    rows,
    entries,
    BLOCK: tl.constexpr,
):
    """One program: BLOCK tokens of one penalised row."""
    blocks = tl.cdiv(vocab, BLOCK)
    index = tl.program_id(0) // blocks
    columns = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocab
    entry = tl.load(entries + index)
    logits += tl.load(rows + index) * stride
    counts = tl.load(output_counts + entry * vocab + columns, mask=inside, other=0)
    prompt = tl.load(in_prompt + entry * vocab + columns, mask=inside, other=0)
    seen = (counts > 0) | (prompt != 0)
    factor = tl.load(repetition + entry)
    x = tl.load(logits + columns, mask=seen, other=0.0).to(tl.float32)
    x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
    x = x - counts.to(tl.float32) * tl.load(frequency + entry)
    x = x - (counts > 0).to(tl.float32) * tl.load(presence + entry)
    tl.store(logits + columns, x.to(logits.dtype.element_ty), mask=seen)


@triton.jit(do_not_specialize=["num_biases", "num_ends"])
def edit_rows(
    logits,
    stride,
    kv_lens,
    bias_ids,
    bias_values,
    num_biases,
    end_ids,
    min_lens,
    num_ends,
    rows,
    entries,
    BLOCK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One program: all edits of one row. The first bias of a token also adds those that follow for the same token."""
    row = tl.load(rows + tl.program_id(0))
    entry = tl.load(entries + tl.program_id(0))
    logits += row * stride
    bias_ids += entry * num_biases
    bias_values += entry * num_biases
    for begin in range(0, num_biases, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        token = tl.load(bias_ids + index, mask=index < num_biases, other=0)
        value = tl.load(bias_values + index, mask=index < num_biases, other=-0.0)
        biases = tl.zeros([BLOCK, COMPARED], tl.float32)
        earlier = tl.zeros([BLOCK, COMPARED], tl.int32)
        for other_begin in range(0, num_biases, COMPARED):
            other_index = other_begin + tl.arange(0, COMPARED)
            other = tl.load(bias_ids + other_index, mask=other_index < num_biases, other=0)
            other_value = tl.load(bias_values + other_index, mask=other_index < num_biases, other=-0.0)
            same = (token[:, None] == other[None, :]) & _counts(other_value)[None, :]
            biases += tl.where(same, other_value[None, :], 0.0)
            earlier += (same & (other_index[None, :] < index[:, None])).to(tl.int32)
        first = _counts(value) & (tl.sum(earlier, axis=1) == 0)
        x = tl.load(logits + token, mask=first, other=0.0).to(tl.float32)
        x += tl.sum(biases, axis=1)
        tl.store(logits + token, x.to(logits.dtype.element_ty), mask=first)
    if tl.load(kv_lens + row) < tl.load(min_lens + entry):
        # An end may have a bias, which another thread has written.
        tl.debug_barrier()
        for begin in range(0, num_ends, BLOCK):
            index = begin + tl.arange(0, BLOCK)
            token = tl.load(end_ids + entry * num_ends + index, mask=index < num_ends, other=0)
            x = tl.load(logits + token, mask=index < num_ends, other=0.0).to(tl.float32)
            never = tl.full([BLOCK], -float("inf"), tl.float32).to(logits.dtype.element_ty)
            tl.store(logits + token, never, mask=(index < num_ends) & (x == x))


@triton.jit
def _counts(value):
    """Whether a bias is one: adding the padding's -0.0 changes no bit."""
    return value.to(tl.int32, bitcast=True) != -0x80000000


@triton.jit
def mask_rows(logits, stride, vocab, bitmask, mask_stride, rows, entries, WORDS: tl.constexpr):
    """One program: 32 tokens each of WORDS words of one row's mask."""
    blocks = tl.cdiv(vocab, WORDS * 32)
    index = tl.program_id(0) // blocks
    word = (tl.program_id(0) % blocks) * WORDS + tl.arange(0, WORDS)
    bit = tl.arange(0, 32)
    columns = word[:, None] * 32 + bit[None, :]
    logits += tl.load(rows + index) * stride
    allowed = tl.load(bitmask + tl.load(entries + index) * mask_stride + word, mask=word * 32 < vocab, other=0)
    forbidden = ((allowed[:, None] >> bit[None, :]) & 1) == 0
    x = tl.load(logits + columns, mask=columns < vocab, other=0.0)
    wide = x.to(tl.float32)
    x = tl.where(forbidden & (wide == wide), -float("inf"), wide).to(x.dtype)
    tl.store(logits + columns, x, mask=columns < vocab)
