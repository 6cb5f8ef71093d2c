"""Choosing a token per row without a sort; kernels/sampling.py says what is chosen.

Rows that draw without filters perturb every token in the first pass over the logits (sampling_summary.py), after which
a small kernel takes the best of each row's chunks. Filters cost two more launches (sampling_candidates.py): then the
last kernel finds the threshold (sampling_threshold.py) and draws among the candidates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.cuda.noise import perturb, perturb_scale, row_keys, step_columns
from kernels.cuda.pdl import is_wanted
from kernels.cuda.sampling_candidates import CAPACITY, MOST_REGISTERS, STATE, find_candidates
from kernels.cuda.sampling_summary import (
    first_best,
    first_of_largest,
    largest_or_nan,
    num_chunks_of,
    num_spans_of,
    row_filters,
    summarise,
)
from kernels.cuda.sampling_threshold import row_threshold, unused_bits
from kernels.noise import SAMPLE
from kernels.sampling import GREEDY_TEMPERATURE

_GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
_STATE = tl.constexpr(STATE)
_AT_ONCE = tl.constexpr(1024)
_NO_COLUMN = tl.constexpr(0x7FFFFFFF)
_ADVANCED_AT_ONCE = 128


def argmax_rows(logits: Tensor) -> Tensor:
    """`kernels.sampling.argmax_rows`; the rows must be dense, and may have any stride."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        num_spans = num_spans_of(vocab)
        scratch = summarise(logits, num_spans)
        block = triton.next_power_of_2(num_spans)
        pdl = is_wanted(logits)
        kernel: Any = take_largest[(rows,)]
        kernel(
            logits,
            logits.stride(0),
            vocab,
            num_spans,
            scratch,
            num_spans,
            tokens,
            BLOCK=block,
            PDL=pdl,
            launch_pdl=pdl,
        )
    return tokens


def advance(last_token: Tensor, rows: Tensor, drawn: Tensor) -> None:
    """`kernels.sampling.advance`; all three dense."""
    num = len(rows)
    if num:
        grid = (triton.cdiv(num, _ADVANCED_AT_ONCE),)
        kernel: Any = advance_rows[grid]
        pdl = is_wanted(rows)
        kernel(last_token, rows, drawn, num, BLOCK=_ADVANCED_AT_ONCE, PDL=pdl, num_warps=1, launch_pdl=pdl)


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
    """`kernels.sampling.sample`; the rows must be dense, and may have any stride, and so must be all vectors.

    A perturbed logit may differ from the reference's by 1e-5 and 1e-6 of itself, and the sums for top-p in rounding.
    """
    if all_greedy:
        return argmax_rows(logits)
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    return draw(logits, parameters, needs_filter=needs_filter, purpose=purpose)


def draw(
    logits: Tensor,
    parameters: tuple[Tensor, ...],
    *,
    needs_filter: bool,
    purpose: int = SAMPLE,
    capacity: int = CAPACITY,
) -> Tensor:
    """`sample` where not all are greedy; capacity: how many candidates of a row are kept."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens
    num_spans = num_spans_of(vocab)
    if needs_filter:
        found = find_candidates(logits, parameters, purpose=purpose, draws=True, capacity=capacity)
        scratch, words, capacity = found.scratch, found.words, found.capacity
    else:
        words = 2 * num_spans
        scratch = summarise(logits, words, parameters, purpose=purpose, draws=True)
    kernel: Any = choose_rows[(rows,)]
    chunks, _, parts = num_chunks_of(rows, vocab)
    chunks *= parts
    pdl = is_wanted(logits)
    kernel(
        logits,
        logits.stride(0),
        vocab,
        num_spans,
        chunks,
        scratch,
        words,
        capacity,
        *parameters,
        tokens,
        PURPOSE=purpose,
        FILTER=needs_filter,
        UNUSED=unused_bits(logits.dtype),
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=triton.next_power_of_2(num_spans),
        INSTRUCTION=logits.is_cuda,
        PDL=pdl,
        num_warps=8 if needs_filter else 4,
        maxnreg=MOST_REGISTERS,
        launch_pdl=pdl,
    )
    return tokens


@triton.jit
def advance_rows(last_token, rows, drawn, num, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: BLOCK of the rows."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + index, mask=index < num, other=0)
    token = tl.load(drawn + index, mask=index < num, other=0)
    tl.store(last_token + row, tl.maximum(token, 0).to(tl.int64), mask=index < num)


@triton.jit
def take_largest(logits, stride, vocab, num_spans, scratch, words, drawn, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program: the argmax of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    token = _largest(logits + row * stride, vocab, num_spans, scratch + row * words, BLOCK)
    tl.store(drawn + row, token)


@triton.jit
def _largest(logits, vocab, num_spans, scratch, BLOCK: tl.constexpr):
    spans = tl.arange(0, BLOCK)
    largest = tl.load(scratch + spans, mask=spans < num_spans, other=-float("inf"))
    token = tl.full([], -1, tl.int32)
    peak = largest_or_nan(largest)
    if peak == peak:
        token = first_of_largest(logits, vocab, largest, spans, peak)
    return token


@triton.jit
def choose_rows(
    logits,
    stride,
    vocab,
    num_spans,
    num_chunks,
    scratch,
    words,
    capacity,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    drawn,
    PURPOSE: tl.constexpr,
    FILTER: tl.constexpr,
    UNUSED: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    INSTRUCTION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: the token of one row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scratch += row * words
    heat = tl.load(temperature + row)
    filters = False
    if FILTER:
        k, p, m = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        filters = row_filters(vocab, k, p, m)
    token = tl.full([], -1, tl.int32)
    if heat < _GREEDY:
        token = _largest(logits, vocab, num_spans, scratch, BLOCK)
    elif filters:
        if FILTER:
            key_a, key_b = row_keys(tl.load(seeds + row), tl.load(positions + row), PURPOSE)
            token = _draw_filtered(
                logits, vocab, scratch + 2 * num_spans, capacity, heat, k, p, m, key_a, key_b, UNUSED, INSTRUCTION
            )
    else:
        chunks = tl.arange(0, CHUNKS)
        inside = chunks < num_chunks
        best = tl.load(scratch + chunks, mask=inside, other=-float("inf"))
        column = tl.load(scratch + num_spans + chunks, mask=inside, other=0.0).to(tl.int32, bitcast=True)
        value, column = first_best(best, tl.where(inside, column, _NO_COLUMN))
        token = tl.where(value != value, token, column)
    tl.store(drawn + row, token)


@triton.jit
def _draw_filtered(
    logits, vocab, state, capacity, temperature, k, p, m, key_a, key_b, UNUSED: tl.constexpr, INSTRUCTION: tl.constexpr
):
    peak = tl.load(state + 1)
    token = tl.full([], -1, tl.int32)
    if peak == -float("inf"):
        # Nothing tells the tokens apart.
        token = tl.full([], 0, tl.int32)
    elif peak == peak:
        threshold = peak
        num = tl.load(state + 3).to(tl.int32, bitcast=True)
        enough = num <= capacity
        if peak < float("inf"):
            threshold, enough = row_threshold(logits, vocab, state, capacity, temperature, k, p, m, UNUSED)
        if enough:
            values = state + _STATE
            columns = (values + capacity).to(tl.pointer_type(tl.int32))
            token = _draw_from(values, columns, num, threshold, temperature, key_a, key_b, INSTRUCTION)
        else:
            token = _draw_from(logits, None, vocab, threshold, temperature, key_a, key_b, INSTRUCTION)
    return token


@triton.jit
def _draw_from(values, columns, num, threshold, temperature, key_a, key_b, INSTRUCTION: tl.constexpr):
    """Column of the largest perturbed value of those that reach the threshold over the temperature."""
    scale = perturb_scale(temperature)
    best = tl.full([_AT_ONCE], -float("inf"), tl.float32)
    place = tl.full([_AT_ONCE], _NO_COLUMN, tl.int32)
    for begin in range(0, num, _AT_ONCE):
        index = begin + tl.arange(0, _AT_ONCE)
        x = tl.load(values + index, mask=index < num, other=-float("inf")).to(tl.float32)
        if columns is None:
            column = index
        else:
            column = tl.load(columns + index, mask=index < num, other=0)
        perturbed = perturb(x, scale, step_columns(column, key_a), key_b, INSTRUCTION)
        perturbed = tl.where((index < num) & (tl.div_rn(x, temperature) >= threshold), perturbed, -float("inf"))
        better = (perturbed > best) | ((perturbed == best) & (column < place))
        best = tl.where(better, perturbed, best)
        place = tl.where(better, column, place)
    _, column = first_best(best, place)
    return column
