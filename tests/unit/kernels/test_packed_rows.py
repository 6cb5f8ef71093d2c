"""Packed rows: selections of rows and columns de-quantise to the same selections of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from kernels.packed_rows import BLOCKS, PACKED_KINDS, PackedRows

# Where a block has float16 numbers, which random bytes would make infinite.
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}


def made(kind: str, rows: int = 37, blocks: int = 3) -> PackedRows:
    columns, size_bytes = BLOCKS[kind]
    rng = np.random.default_rng(len(kind) + rows)
    data = rng.integers(0, 256, (rows, blocks, size_bytes), dtype=np.uint8)
    for place in SCALES.get(kind, (0,)):
        data[..., place : place + 2] = rng.uniform(0.01, 2, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    return PackedRows(kind, torch.from_numpy(data.reshape(rows, -1)), blocks * columns)


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_selections(kind: str) -> None:
    packed, columns = made(kind), BLOCKS[kind].columns
    whole = packed.dequantise()
    assert (packed.rows, packed.cols) == packed.shape == tuple(whole.shape)
    expected = quants.dequantize(packed.data.numpy(), GGMLQuantizationType[kind])
    assert torch.equal(whole, torch.from_numpy(expected))
    assert bool(whole.isfinite().all()) and whole.dtype == torch.float32
    index = torch.tensor([36, 0, 0, 5])
    for rows in (slice(None), slice(3, 20), slice(-4, None), slice(0, 0), index, torch.arange(37) % 3 == 0):
        assert torch.equal(packed[rows].dequantise(), whole[rows])
        part = packed[rows, columns : 2 * columns]
        assert part.shape == (whole[rows].shape[0], columns)
        assert torch.equal(part.dequantise(), whole[rows][:, columns : 2 * columns])
    assert torch.equal(packed[:, columns:][2:9, -columns:].dequantise(), whole[2:9, -columns:])
    assert packed[2:9].data.data_ptr() == packed.data[2:].data_ptr()


@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_the_table_is_ggmls(kind: str) -> None:
    assert GGML_QUANT_SIZES[GGMLQuantizationType[kind]] == BLOCKS[kind]


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_columns_that_cut_a_block(kind: str) -> None:
    packed, columns = made(kind), BLOCKS[kind].columns
    for cut in (slice(1, columns), slice(0, columns + 16), slice(16, 16 + columns), slice(None, None, 2)):
        with pytest.raises(ValueError, match=f"cut the {columns} of a {kind} block"):
            packed[:, cut]


def test_what_is_no_matrix() -> None:
    data = torch.zeros(2, 36, dtype=torch.uint8)
    assert PackedRows("Q4_0", data, 64).shape == (2, 64)
    for kind, tensor, cols in (
        ("Q4_0", data, 32),
        ("Q4_0", data, 65),
        ("Q4_1", data, 64),
        ("Q4_0", data.flatten(), 64),
        ("Q2_K", data, 64),
        ("F16", data, 18),
    ):
        with pytest.raises(ValueError, match=kind):
            PackedRows(kind, tensor, cols)


def test_many_rows_in_pieces() -> None:
    packed = made("Q8_0", rows=3000, blocks=2)
    assert torch.equal(packed[2990:].dequantise(), packed.dequantise()[2990:])
    assert packed[0:0].dequantise().shape == (0, 64)
    assert packed[:, 64:].dequantise().shape == (3000, 0)
