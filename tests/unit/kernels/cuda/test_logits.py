"""Changes of logits against the reference, bit for bit."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from kernels import logits as reference
from kernels.cuda.logits import adjust_logits, mask_logits
from kernels.logits import AdjustedRows, EditTable, PenaltyTable

INTS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def _assert_same_bits(got: Tensor, expected: Tensor, *, rounded: bool = False) -> None:
    """rounded: bfloat16 was rounded, which the interpreter does by cutting off."""
    if rounded and got.dtype == torch.bfloat16 and got.device.type == "cpu":
        torch.testing.assert_close(got, expected, atol=0.2, rtol=2e-2, equal_nan=True)
        return
    assert torch.equal(got.isnan(), expected.isnan())
    ints = INTS[got.dtype]
    same = got.contiguous().view(ints) == expected.contiguous().view(ints)
    assert bool((same | got.isnan()).all()), (~same).nonzero()[:5]


def _penalties(entries: int, vocab: int, device: torch.device, generator: torch.Generator) -> PenaltyTable:
    counts = torch.randint(0, 5, (entries, vocab), generator=generator, dtype=torch.int32)
    counts *= torch.rand(entries, vocab, generator=generator) < 0.1
    return PenaltyTable(
        (torch.rand(entries, generator=generator) + 0.6).to(device),
        torch.randn(entries, generator=generator).to(device),
        torch.randn(entries, generator=generator).to(device),
        (torch.rand(entries, vocab, generator=generator) < 0.1).to(device),
        counts.to(device),
    )


def _edits(entries: int, vocab: int, device: torch.device, generator: torch.Generator, biases: int = 90) -> EditTable:
    """Half of each entry's biases are padding, which names the token 0; so does a true bias of the entries' half."""
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:biases] for _ in range(entries)])
    values = torch.randn(entries, biases, generator=generator) * 10
    ids[:, biases // 2 :], values[:, biases // 2 :] = 0, -0.0
    ids[::2, 0] = 0
    ends = torch.randint(0, vocab, (entries, 5), generator=generator)
    ends[:, 3:] = ends[:, :1]
    ends[:, 1] = ids[:, 1]
    min_lens = torch.randint(0, 2, (entries,), generator=generator) * 20
    return EditTable(ids.to(device), values.to(device), ends.to(device), min_lens.to(device))


def _no_rows(device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.int64, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [100, 4099])
def test_adjusted(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows, entries = 9, 12
    logits = (torch.randn(rows, vocab + 60, generator=generator) * 4).to(device, dtype)[:, :vocab]
    logits[0, :50] = torch.nan
    logits[1, :] = -torch.inf
    logits[2, :] = -0.0
    adjusted = AdjustedRows(
        torch.tensor([0, 5, 1, 2, 8], device=device),
        torch.tensor([3, 3, 0, 11, 7], device=device),
        torch.tensor([8, 3, 0, 2, 1], device=device),
        torch.tensor([1, 2, 10, 4, 5], device=device),
    )
    kv_lens = torch.full((rows,), 10, device=device)
    penalties = _penalties(entries, vocab, device, generator)
    edits = _edits(entries, vocab, device, generator)
    expected = logits.clone()
    reference.adjust_logits(expected, kv_lens, penalties, edits, adjusted)
    adjust_logits(logits, kv_lens, penalties, edits, adjusted)
    _assert_same_bits(logits, expected, rounded=True)
    alone = torch.tensor([4, 6, 7], device=device)
    _assert_same_bits(logits[alone], expected[alone])


def test_several_biases_of_one_token_add_up(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 50, generator=generator).to(device)
    edits = EditTable(
        torch.randint(0, 10, (1, 100), generator=generator).to(device),
        torch.randn(1, 100, generator=generator).to(device),
        torch.zeros(1, 1, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    one = torch.ones(1, dtype=torch.int64, device=device)
    adjusted = AdjustedRows(_no_rows(device), _no_rows(device), one, one - 1)
    kv_lens = torch.ones(2, dtype=torch.int64, device=device)
    penalties = _penalties(1, 50, device, generator)
    expected = logits.clone()
    reference.adjust_logits(expected, kv_lens, penalties, edits, adjusted)
    adjust_logits(logits, kv_lens, penalties, edits, adjusted)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_nobody_wants_anything(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 50, generator=generator).to(device)
    before = logits.clone()
    tables = _penalties(1, 50, device, generator), _edits(1, 50, device, generator, 4)
    nobody = AdjustedRows(*(_no_rows(device) for _ in fields(AdjustedRows)))
    adjust_logits(logits, torch.ones(2, dtype=torch.int64, device=device), *tables, nobody)
    empty = EditTable(
        *(torch.empty(1, 0, dtype=dtype, device=device) for dtype in (torch.int64, torch.float32, torch.int64)),
        torch.zeros(1, dtype=torch.int64, device=device),
    )
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    somebody = AdjustedRows(_no_rows(device), _no_rows(device), zero, zero)
    adjust_logits(logits, torch.ones(2, dtype=torch.int64, device=device), tables[0], empty, somebody)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 31, 4099])
def test_masked(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab + 3, generator=generator).to(device, dtype)[:, :vocab]
    logits[3, : vocab // 2] = torch.nan
    words = (vocab + 31) // 32
    bitmask = torch.randint(-(2**31), 2**31, (4, words), generator=generator).to(device, torch.int32)
    bitmask[2] = 0
    rows, entries = torch.tensor([3, 0, 4], device=device), torch.tensor([1, 3, 2], device=device)
    expected = logits.clone()
    reference.mask_logits(expected, bitmask, rows, entries)
    mask_logits(logits, bitmask, rows, entries)
    _assert_same_bits(logits, expected)
    mask_logits(logits, bitmask, rows[:0], entries[:0])
    _assert_same_bits(logits, expected)
