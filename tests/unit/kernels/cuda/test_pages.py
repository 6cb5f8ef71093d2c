"""Page tables and moving keys and values in Triton, against kernels.pages."""

from __future__ import annotations

import pytest
import torch

from kernels import pages as reference
from kernels.cuda import pages
from kernels.pages import KVLayers

POISON = 1 << 30


def poisoned_table(slots: int, width: int, page_size: int, kv_lens: list[int], device: torch.device) -> torch.Tensor:
    """Distinct pages for the tokens of the last rows, and what nobody may read elsewhere."""
    table = torch.full((slots, width), POISON, dtype=torch.int32)
    ids = iter(range(1, slots * width + 1))
    for row, kv_len in enumerate(kv_lens, slots - len(kv_lens)):
        for column in range(-(-kv_len // page_size)):
            table[row, column] = next(ids)
    return table.to(device)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("num_columns", [1, 5, 12])
def test_gather_pages(page_size: int, num_columns: int, device: torch.device) -> None:
    kv_lens = [num_columns * page_size, 1, 0, (num_columns - 1) * page_size + 1]
    table = poisoned_table(7, 12, page_size, kv_lens, device)
    rows, lens = torch.tensor([6, 4, 5, 3], device=device), torch.tensor(kv_lens, device=device)[[3, 1, 2, 0]]
    got = pages.gather_pages(table, rows, lens, page_size, num_columns)
    assert got.is_contiguous() and got.dtype == torch.int32 and int(got.max()) < POISON
    assert torch.equal(got, reference.gather_pages(table, rows, lens, page_size, num_columns))


def test_gather_pages_of_several_blocks(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "BLOCK", 4)
    table = torch.arange(33, dtype=torch.int32, device=device).view(3, 11)
    rows, lens = torch.tensor([2, 0], device=device), torch.tensor([9, 4], device=device)
    assert torch.equal(pages.gather_pages(table, rows, lens, 1, 10), reference.gather_pages(table, rows, lens, 1, 10))


def test_gather_nothing(device: torch.device) -> None:
    table, none = torch.zeros(2, 3, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    assert pages.gather_pages(table, none, none, 16, 3).shape == (0, 3)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kv_lens", [[3], [0, 0], [5, 0, 64, 65, 1], [0, 7, 33, 0]])
@pytest.mark.parametrize("block", [16, 1024])
def test_page_lists(
    page_size: int, kv_lens: list[int], block: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "BLOCK", block)
    used = sum(-(-kv_len // page_size) for kv_len in kv_lens)
    table = poisoned_table(len(kv_lens), 70, page_size, kv_lens, device)
    lens = torch.tensor(kv_lens, device=device)
    for size in (used, used + 1, used + 13):
        got = pages.page_lists(table, lens, page_size, size)
        expected = reference.page_lists(table, lens, page_size, size)
        for part, expected_part in zip(got, expected, strict=True):
            assert part.dtype == expected_part.dtype
            assert torch.equal(part, expected_part)


def test_page_lists_of_many_rows(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_ROWS", 4)
    lens = torch.arange(21, device=device) % 3
    table = torch.arange(42, dtype=torch.int32, device=device).view(21, 2)
    got, expected = pages.page_lists(table, lens, 1, 30), reference.page_lists(table, lens, 1, 30)
    assert all(torch.equal(part, expected_part) for part, expected_part in zip(got, expected, strict=True))


def test_page_lists_of_nothing(device: torch.device) -> None:
    table, none = torch.zeros(0, 3, dtype=torch.int32, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    ids, starts, last = pages.page_lists(table, none, 16, 4)
    assert ids.tolist() == [0] * 4 and starts.tolist() == [0] and len(last) == 0


def poisoned_kv(dtype: torch.dtype, page_size: int, heads: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Three layers' pages with random numbers; a layer apart from the next."""
    kv = torch.randn(3, 2, 9, 2, page_size, *heads, generator=torch.Generator().manual_seed(page_size))
    return kv.to(device, dtype)[:, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("page_size", [1, 16])
def test_compact_kv(dtype: torch.dtype, page_size: int, device: torch.device) -> None:
    kv = poisoned_kv(dtype, page_size, (2, 24), device)
    # Row 0: sources are later targets; row 1 does not move; row 2 stays in place once; row 3: all of its places.
    sources = torch.tensor([[1, 3, 4, 99], [99, 99, 99, 99], [5, 7, 99, 99], [8, 99, 99, 99]], device=device)
    targets = torch.tensor([[0, 1, 3, 99], [99, 99, 99, 99], [5, 6, 99, 99], [2, 99, 99, 99]], device=device)
    counts = torch.tensor([3, 0, 2, 1], device=device)
    before = kv.clone()
    pages.compact_kv(KVLayers.of(kv.unbind()), sources, targets, counts)
    expected = before.clone()
    for row in range(4):
        for i in range(int(counts[row])):
            source, target = int(sources[row, i]), int(targets[row, i])
            moved = expected[:, source // page_size, :, source % page_size].clone()
            expected[:, target // page_size, :, target % page_size] = moved
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("heads", [(5, 8), (3, 80)])
def test_compact_many_places_of_heads_apart(heads: tuple[int, int], device: torch.device) -> None:
    wide = torch.randn(2, 4, 2, 16, heads[0], heads[1] + 8, device=device)
    kv = wide[..., : heads[1]]
    sources, targets = torch.arange(3, 14, device=device), torch.arange(2, 13, device=device)
    before, counts = wide.clone(), torch.tensor([10], device=device)
    # Columns of a matrix, whose places are not neighbours.
    columns = [places.unsqueeze(1).repeat(1, 2)[:, :1].T for places in (sources, targets)]
    pages.compact_kv(KVLayers.of(kv.unbind()), columns[0], columns[1], counts)
    before[:, 0, :, 2:12, :, : heads[1]] = before[:, 0, :, 3:13, :, : heads[1]].clone()
    assert torch.equal(wide, before)


def test_compact_nothing(device: torch.device) -> None:
    kv = poisoned_kv(torch.float32, 16, (2, 8), device)
    before, none = kv.clone(), torch.zeros(0, 3, dtype=torch.int64, device=device)
    pages.compact_kv(KVLayers.of(kv.unbind()), none, none, none[:, 0])
    assert torch.equal(kv, before)
