"""adjust_logits and mask_logits against the rules, token by token; rows that they must leave alone; NaN."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.logits import AdjustedRows, EditTable, PenaltyTable, adjust_logits, mask_logits
from tests.unit.kernels.wishes import Wish, naive, random_wish

VOCAB = 60


def tables(wishes: list[Wish | None]) -> tuple[PenaltyTable, EditTable, AdjustedRows]:
    """Every wish takes the entry after its row's number in both tables; entry 0 is nobody's."""
    num = len(wishes) + 1
    some = [wish or Wish() for wish in [None, *wishes]]
    biases = max(len(wish.bias) for wish in some)
    ends = max(len(wish.ends) for wish in some)
    penalties = PenaltyTable(
        torch.tensor([wish.repetition for wish in some]),
        torch.tensor([wish.presence for wish in some]),
        torch.tensor([wish.frequency for wish in some]),
        torch.zeros(num, VOCAB, dtype=torch.bool),
        torch.zeros(num, VOCAB, dtype=torch.int32),
    )
    for entry, wish in enumerate(some):
        penalties.in_prompt[entry, wish.prompt] = True
        for token in wish.output:
            penalties.output_counts[entry, token] += 1

    def padded(parts: list[list], width: int, pad: list, dtype: torch.dtype) -> Tensor:
        filled = [part + [pad[i]] * (width - len(part)) for i, part in enumerate(parts)]
        return torch.tensor(filled, dtype=dtype).view(num, width)

    edits = EditTable(
        padded([list(wish.bias) for wish in some], biases, [0] * num, torch.int64),
        padded([list(wish.bias.values()) for wish in some], biases, [-0.0] * num, torch.float32),
        padded([wish.ends for wish in some], ends, [(wish.ends or [0])[0] for wish in some], torch.int64),
        torch.tensor([wish.min_len if wish.ends else 0 for wish in some]),
    )
    rows = torch.tensor([row for row, wish in enumerate(wishes) if wish is not None], dtype=torch.int64)
    return penalties, edits, AdjustedRows(rows, rows + 1, rows, rows + 1)


def adjusted(logits: Tensor, kv_lens: list[int], wishes: list[Wish | None]) -> Tensor:
    changed = logits.clone()
    adjust_logits(changed, torch.tensor(kv_lens), *tables(wishes))
    return changed


def bits(values: np.ndarray) -> list[int]:
    return values.view(np.int32).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_against_the_rules(seed: int) -> None:
    rng = np.random.default_rng(seed)
    wishes = [None if row % 4 == 3 else random_wish(rng, VOCAB) for row in range(16)]
    kv_lens = rng.integers(1, 40, 16).tolist()
    logits = torch.from_numpy(rng.normal(size=(16, VOCAB)).astype(np.float32) * 4)
    logits[5, 7] = 0.0
    got = adjusted(logits, kv_lens, wishes)
    for row, wish in enumerate(wishes):
        expected = logits[row].numpy() if wish is None else naive(logits[row].numpy(), wish, kv_lens[row])
        np.testing.assert_array_equal(got[row].numpy(), expected, err_msg=str(wish))


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(9)
    wishes: list[Wish | None] = [random_wish(rng, VOCAB) for _ in range(8)]
    wishes[2] = None
    kv_lens = [30] * 8
    logits = torch.from_numpy(rng.normal(size=(8, VOCAB)).astype(np.float32))
    logits[:, 0] = -0.0
    together = adjusted(logits, kv_lens, wishes)
    assert bits(together[2].numpy()) == bits(logits[2].numpy())
    for row in range(8):
        alone = adjusted(logits[row : row + 1], kv_lens[row : row + 1], wishes[row : row + 1])
        assert bits(alone[0].numpy()) == bits(together[row].numpy())


def test_penalties_come_before_bias_and_ends_last() -> None:
    wish = Wish(repetition=2.0, presence=0.5, frequency=0.25, prompt=[1], output=[1, 1, 2], bias={1: 10.0, 3: 5.0})
    wish.ends, wish.min_len = [3], 9
    logits = torch.zeros(1, VOCAB)
    logits[0, :4] = torch.tensor([4.0, 4.0, -4.0, 4.0])
    early, late = adjusted(logits, [8], [wish])[0], adjusted(logits, [9], [wish])[0]
    assert early[:4].tolist() == [4.0, 4.0 / 2 - 0.5 - 0.5 + 10, -4.0 * 2 - 0.25 - 0.5, -torch.inf]
    assert late[:4].tolist() == [*early[:3].tolist(), 9.0]


def test_nan_survives_everything() -> None:
    wish = Wish(2.0, 1.0, 1.0, [3], [3, 3], {3: 100.0}, [3], 50)
    logits = torch.zeros(2, VOCAB)
    logits[0, 3] = torch.nan
    got = adjusted(logits, [10, 10], [wish, wish])
    assert bool(got[0, 3].isnan()) and not bool(got[0, :3].isnan().any())
    assert float(got[1, 3]) == -torch.inf


def test_equal_values_stay_equal_under_equal_penalties() -> None:
    logits = torch.full((2, 5000), 1.25)
    empty = torch.zeros(0, dtype=torch.int64)
    penalties = PenaltyTable(
        torch.tensor([1.7]),
        torch.tensor([0.3]),
        torch.tensor([0.1]),
        torch.ones(1, 5000, dtype=torch.bool),
        torch.full((1, 5000), 3, dtype=torch.int32),
    )
    edits = EditTable(empty.view(0, 0), empty.view(0, 0).float(), empty.view(0, 0), empty)
    rows = AdjustedRows(torch.tensor([1]), torch.tensor([0]), empty, empty)
    adjust_logits(logits, torch.tensor([4, 4]), penalties, edits, rows)
    assert logits[0].tolist() == [1.25] * 5000
    assert len(set(logits[1].tolist())) == 1


def test_short_floats_are_rounded_after_each_table() -> None:
    rng = np.random.default_rng(4)
    wishes: list[Wish | None] = [None if row % 4 == 3 else random_wish(rng, VOCAB) for row in range(16)]
    kv_lens = rng.integers(1, 40, 16).tolist()
    logits = torch.from_numpy(rng.normal(size=(16, VOCAB)).astype(np.float32) * 4).bfloat16()
    got = adjusted(logits, kv_lens, wishes)
    assert got.dtype == torch.bfloat16
    for row, wish in enumerate(wishes):
        expected = logits[row]
        if wish is not None:
            penalties = Wish(wish.repetition, wish.presence, wish.frequency, wish.prompt, wish.output)
            edits = Wish(bias=wish.bias, ends=wish.ends, min_len=wish.min_len)
            for part in (penalties, edits):
                expected = torch.from_numpy(naive(expected.float().numpy(), part, kv_lens[row])).bfloat16()
        assert torch.equal(got[row], expected), wish


def test_a_token_may_have_padding_and_a_bias() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    edits = EditTable(
        torch.tensor([[0, 5, 0, 0]]),
        torch.tensor([[1.5, 2.5, -0.0, -0.0]]),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
    )
    zero = torch.zeros(1, dtype=torch.int64)
    nothing = empty.float()
    penalties = PenaltyTable(nothing, nothing, nothing, empty.view(0, 8).bool(), empty.view(0, 8).int())
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.full((2, 8), -0.0, dtype=dtype)
        adjust_logits(logits, torch.tensor([3, 3]), penalties, edits, AdjustedRows(empty, empty, zero, zero))
        assert logits[0].tolist() == [1.5, 0.0, 0.0, 0.0, 0.0, 2.5, 0.0, 0.0]
        assert bool(logits[0, 1].signbit()) and bool(logits[1].signbit().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 32, 61])
def test_masks_bit_by_bit(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator).to(dtype)
    logits[2, vocab // 3 :] = torch.nan
    bitmask = torch.randint(-(2**31), 2**31, (3, (vocab + 31) // 32), generator=generator).int()
    rows, entries = torch.tensor([3, 2]), torch.tensor([0, 2])
    got = logits.clone()
    mask_logits(got, bitmask, rows, entries)
    for row in range(4):
        for token in range(vocab):
            before, after = float(logits[row, token]), float(got[row, token])
            allowed = True
            if row in (2, 3):
                word = int(bitmask[int(entries[rows.tolist().index(row)]), token // 32]) & 0xFFFFFFFF
                allowed = bool(word >> token % 32 & 1)
            if np.isnan(before):
                assert np.isnan(after)
            else:
                assert after == (before if allowed else -np.inf)
