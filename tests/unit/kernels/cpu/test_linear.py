"""Packed matrices against their torch references: every packing, odd sizes, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch

from kernels import packed as reference
from kernels.cpu import linear as native_ops
from kernels.cpu import native
from kernels.cpu.matrix import PackedLinear, activation_bytes, pack
from kernels.packed_rows import BLOCKS, PACKED_KINDS
from tests.support.packed import every_isa, needs_kernels, random_rows, using

pytestmark = needs_kernels


def _x(num_tokens: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, dim, generator=torch.Generator().manual_seed(seed))


def _close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) <= 2e-6 * float(expected.abs().max()) + 1e-12


@every_isa
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_tiles_hold_what_the_rows_held(isa: str, kind: str) -> None:
    rows = random_rows(kind, 37, 3 * BLOCKS[kind].columns)
    with using(isa):
        assert torch.equal(pack(rows).dequantise(), rows.dequantise())


@every_isa
@pytest.mark.parametrize("kind", PACKED_KINDS)
@pytest.mark.parametrize(("num_rows", "blocks"), [(1, 1), (16, 3), (37, 2), (100, 18)])
def test_linear(isa: str, kind: str, num_rows: int, blocks: int) -> None:
    cols = max(32 * blocks // BLOCKS[kind].columns, 1) * BLOCKS[kind].columns
    rows = random_rows(kind, num_rows, cols)
    bias = torch.randn(num_rows)
    for num_tokens in (1, 2, 3, 5, 8, 13):
        with using(isa):
            x = native_ops.quantise_rows(_x(num_tokens, cols))
            got = native_ops.packed_linear(PackedLinear([pack(rows)], bias), x)
        wide = reference.dequantise_rows(x, cols).double()
        _close(got, (wide @ rows.dequantise().double().T).float() + bias)


@every_isa
def test_matrices_of_different_packings_are_one_layer(isa: str) -> None:
    parts = [random_rows("Q4_K", 48, 256), random_rows("Q6_K", 5, 256, 1), random_rows("Q8_0", 17, 256, 2)]
    with using(isa):
        x = native_ops.quantise_rows(_x(9, 256))
        layer = PackedLinear([pack(part) for part in parts], torch.randn(70))
        _close(native_ops.packed_linear(layer, x), reference.packed_linear(layer, x))


@every_isa
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 100, 577])
def test_int8_of_float_matrices_of_any_width(isa: str, cols: int) -> None:
    weight = torch.randn(21, cols)
    with using(isa):
        matrix = pack(weight)
        limit = weight.abs().max() / 127
        assert float((matrix.dequantise() - weight).abs().max()) <= 0.51 * float(limit)
        x = native_ops.quantise_rows(_x(4, cols))
        layer = PackedLinear([matrix], None)
        _close(native_ops.packed_linear(layer, x), reference.packed_linear(layer, x))


def test_int8_of_the_smallest_and_largest_weights() -> None:
    weight = torch.tensor([[0.0] * 32, [1e-9] * 32, [6e4] * 32, [8e6] * 32])
    got = pack(weight).dequantise()
    assert torch.equal(got[0], weight[0])
    assert torch.isfinite(got).all()
    assert torch.allclose(got[2], weight[2], rtol=1e-2)


@pytest.mark.parametrize("largest", [1e-3, 1e-4, 1e-5, 4e-6])
def test_int8_does_not_clip_small_blocks(largest: float) -> None:
    weight = torch.linspace(-1, 1, 64).view(2, 32) * largest
    error = (pack(weight).dequantise() - weight).abs().max()
    # A float16 scale below the normal numbers is a multiple of 2^-24.
    assert float(error) <= 0.51 * (largest / 127 + 2**-24)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf"), 1e9])
def test_weights_that_int8_cannot_hold_are_refused(broken: float) -> None:
    weight = torch.ones(3, 40)
    weight[2, 35] = broken
    with pytest.raises(ValueError, match="int8 packing takes"):
        pack(weight)


@every_isa
@pytest.mark.parametrize("inner", [16, 32, 40, 96, 250])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gated_linear(isa: str, inner: int, with_bias: bool) -> None:
    gate, up = random_rows("Q4_1", inner, 96, 1), random_rows("Q8_0", inner, 96, 2)
    with using(isa):
        layer = PackedLinear([pack(gate), pack(up)], torch.randn(2 * inner) if with_bias else None)
        x = native_ops.quantise_rows(_x(11, 96))
        got = reference.dequantise_rows(native_ops.packed_gated_linear(layer, x), inner)
        expected = reference.dequantise_rows(reference.packed_gated_linear(layer, x), inner)
    # Both round to a grid of their own: one step apart at most.
    assert float((got - expected).abs().max()) <= 1.1 * float(expected.abs().max()) / 127


@every_isa
def test_activation_rows(isa: str) -> None:
    for dim in (1, 16, 31, 32, 100, 576):
        x = _x(5, dim) * torch.logspace(-12, 6, 5).unsqueeze(1)
        x[2] = 0
        with using(isa):
            got = native_ops.quantise_rows(x)
        used = -(-dim // 32) * 52
        assert got.shape == (5, activation_bytes(dim))
        expected = reference.quantise_rows(x)
        wide, exact = reference.dequantise_rows(got, dim), reference.dequantise_rows(expected, dim)
        assert float((wide - x).abs().div(x.abs().amax(1, keepdim=True).clamp(min=1e-30)).max()) <= 0.51 / 127
        # The same but where x / scale lies between two codes.
        assert (got[:, :used] != expected[:, :used]).float().mean() < 0.02
        assert torch.allclose(wide, exact, atol=float(x.abs().max()) / 127)


@every_isa
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_shows(isa: str, broken: float) -> None:
    x = _x(3, 64)
    x[1, 40] = broken
    with using(isa):
        layer = PackedLinear([pack(random_rows("Q4_1", 20, 64))], None)
        got = native_ops.packed_linear(layer, native_ops.quantise_rows(x))
    assert got[1].isnan().all()
    assert torch.isfinite(got[[0, 2]]).all()


@every_isa
@pytest.mark.parametrize("kind", PACKED_KINDS)
def test_a_tokens_result_does_not_depend_on_its_neighbours_or_threads(isa: str, kind: str) -> None:
    layer = PackedLinear([pack(random_rows(kind, 100, 512))], None)
    gated = PackedLinear([pack(random_rows(kind, 96, 512, seed)) for seed in (1, 2)], None)
    x = _x(257, 512)
    with using(isa, threads=1):
        rows = native_ops.quantise_rows(x)
        whole, inner = native_ops.packed_linear(layer, rows), native_ops.packed_gated_linear(gated, rows)
        used = 3 * 52
        alone = torch.cat([native_ops.packed_linear(layer, rows[i : i + 1]) for i in range(17)])
        assert torch.equal(alone, whole[:17])
    for threads, size in ((2, 257), (3, 7), (1, 3)):
        with using(isa, threads):
            for begin in range(0, 257, size * 8):
                part = rows[begin : begin + size]
                assert torch.equal(native_ops.packed_linear(layer, part), whole[begin : begin + size])
                got = native_ops.packed_gated_linear(gated, part)
                assert torch.equal(got[:, :used], inner[begin : begin + size, :used])


def test_embedding_rows() -> None:
    rows = random_rows("Q6_K", 50, 256)
    ids = torch.tensor([49, 0, 17, 17])
    assert torch.equal(native_ops.packed_embed(pack(rows), ids), rows.dequantise()[ids])


def test_layers_of_different_inputs_are_refused() -> None:
    with pytest.raises(ValueError, match="columns"):
        PackedLinear([pack(torch.zeros(4, 32)), pack(torch.zeros(4, 64))], None)


def test_unknown_instruction_set() -> None:
    with pytest.raises(ValueError, match="there are scalar, avx2, avx512"):
        native.set_isa("avx9")
    with pytest.raises(ValueError, match="1 to 1024"):
        native.set_threads(0)
