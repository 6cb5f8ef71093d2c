"""Page tables and moving keys and values: the torch references against slow loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.pages import KVLayers, compact_kv, gather_pages, page_lists


def num_pages(kv_len: int, page_size: int) -> int:
    return -(-kv_len // page_size)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_gather_pages(page_size: int) -> None:
    table = torch.arange(60, dtype=torch.int32).view(5, 12) + 100
    kv_lens = [0, 1, page_size, 3 * page_size + 1, 5 * page_size]
    rows = [4, 4, 0, 2, 1]
    got = gather_pages(table, torch.tensor(rows), torch.tensor(kv_lens), page_size, 5)
    assert got.dtype == torch.int32 and got.is_contiguous()
    for row, kv_len, pages in zip(rows, kv_lens, got.tolist(), strict=True):
        used = num_pages(kv_len, page_size)
        assert pages == table[row, :used].tolist() + [0] * (5 - used)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("spare", [0, 1, 9])
@pytest.mark.parametrize("kv_lens", [[5], [0], [0, 33, 0, 64, 1, 0]])
def test_page_lists(kv_lens: list[int], spare: int, page_size: int) -> None:
    table = torch.arange(len(kv_lens) * 64, dtype=torch.int32).view(-1, 64) + 1
    expected: list[int] = []
    starts, last = [0], []
    for row, kv_len in enumerate(kv_lens):
        used = num_pages(kv_len, page_size)
        expected += table[row, :used].tolist()
        starts.append(len(expected))
        last.append(kv_len - (used - 1) * page_size if used else 0)
    size = len(expected) + spare
    got = page_lists(table, torch.tensor(kv_lens), page_size, size)
    assert [part.dtype for part in got] == [torch.int32] * 3
    assert [part.tolist() for part in got] == [expected + [0] * spare, starts, last]


def moved_one_by_one(kv: Tensor, sources: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    page_size, kv = kv.shape[3], kv.clone()
    for row, count in enumerate(counts.tolist()):
        for source, target in zip(sources[row, :count].tolist(), targets[row, :count].tolist(), strict=True):
            value = kv[:, source // page_size, :, source % page_size].clone()
            kv[:, target // page_size, :, target % page_size] = value
    return kv


def assert_moved(dtype: torch.dtype, page_size: int, sources: Tensor, targets: Tensor, counts: Tensor) -> None:
    kv = torch.randn(3, 2, 32 // page_size, 2, page_size, 2, 8).to(dtype)[:, 1]
    expected = moved_one_by_one(kv, sources, targets, counts)
    compact_kv(KVLayers.of(kv.unbind()), sources, targets, counts)
    assert torch.equal(kv.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("page_size", [1, 4])
def test_compact_kv(dtype: torch.dtype, page_size: int) -> None:
    sources = torch.tensor([[3, 4, 7], [9, 10, 11], [17, 19, 20], [24, 27, 0]])
    targets = torch.tensor([[1, 3, 4], [9, 10, 11], [16, 18, 0], [25, 26, 0]])
    assert_moved(dtype, page_size, sources, targets, torch.tensor([3, 0, 2, 1]))


def test_compact_kv_onto_the_first_source() -> None:
    """A row's first source is a later target, and its last column does not move."""
    sources, targets = torch.tensor([[3, 4, 6]]), torch.tensor([[2, 3, 4]])
    assert_moved(torch.float32, 4, sources, targets, torch.tensor([2]))
