"""rope_store of the CPU kernels against the torch reference, for every element type of the pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import rope_store as reference
from kernels.cpu.rotary import rope_store
from tests.support.packed import every_isa, needs_kernels, using

pytestmark = needs_kernels

TOKENS, PAGES, PAGE_SIZE = 5, 4, 3


class _Inputs:
    def __init__(self, heads: int, kv_heads: int, dim: int, rotary_dim: int, normed: bool) -> None:
        gen = torch.Generator().manual_seed(dim)
        self.sizes = (heads, kv_heads, kv_heads)
        self.fused = torch.randn(TOKENS, sum(self.sizes), dim, generator=gen) * 3
        self.positions = torch.randint(0, 40, (TOKENS,), generator=gen)
        self.locations = torch.randperm(PAGES * PAGE_SIZE, generator=gen)[:TOKENS]
        angles = torch.rand(40, rotary_dim // 2, generator=gen) * 6
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        self.norms = [torch.rand(dim, generator=gen) + 0.5 if normed else None for _ in range(2)]

    def run(self, op, kv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v after the op."""
        q, k, v = self.fused.clone().split(self.sizes, dim=1)
        op(q, k, v, self.positions, self.cos_sin, kv, self.locations, *self.norms, 1e-6)
        return q, k, v


def _check_int8(kv: Tensor, expected: Tensor) -> None:
    dim = expected.shape[-1]
    scale = kv[..., dim:].contiguous().view(torch.float32)
    torch.testing.assert_close(scale, expected.abs().amax(-1, keepdim=True) / 127, rtol=1e-6, atol=0)
    assert int(kv[..., :dim].abs().max()) == 127
    assert float(((kv[..., :dim] * scale - expected).abs() / scale).max()) < 0.501


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary_dim"), [(9, 3, 64, 64), (4, 4, 80, 80), (2, 1, 72, 24)])
@pytest.mark.parametrize("normed", [False, True])
def test_matches_reference(
    isa: str, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotary_dim: int, normed: bool
) -> None:
    inputs = _Inputs(heads, kv_heads, dim, rotary_dim, normed)
    plain = torch.zeros(PAGES, 2, PAGE_SIZE, kv_heads, dim)
    expected, _, _ = inputs.run(reference.rope_store, plain)
    size = dim + 4 if dtype == torch.int8 else dim
    layers = torch.full((PAGES, 3, 2, PAGE_SIZE, kv_heads, size), 77, dtype=dtype)
    with using(isa):
        q, k, v = inputs.run(rope_store, layers[:, 1])
    torch.testing.assert_close(q, expected, rtol=2e-6, atol=2e-6)
    assert torch.equal(torch.cat((k, v), 1), inputs.fused[:, heads:])

    pages, offsets = inputs.locations // PAGE_SIZE, inputs.locations % PAGE_SIZE
    stored, wanted = layers[pages, 1, :, offsets], plain[pages, :, offsets]
    if dtype == torch.int8:
        _check_int8(stored, wanted)
    elif normed:
        tolerance = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
        torch.testing.assert_close(stored.float(), wanted, rtol=tolerance, atol=tolerance)
    else:
        assert torch.equal(stored, wanted.to(dtype))
    layers[pages, 1, :, offsets] = 77
    assert (layers == 77).all()


@every_isa
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_what_is_not_finite(isa: str, dtype: torch.dtype) -> None:
    """NaN stays NaN; too large becomes infinity, or NaN in int8; zeros have a scale of zero."""
    inputs = _Inputs(1, 1, 24, 24, False)
    inputs.cos_sin[:, :12], inputs.cos_sin[:, 12:] = 1.0, 0.0
    inputs.fused[0, 2, 17] = torch.nan
    inputs.fused[1, 2, 3] = torch.inf
    inputs.fused[2, 2] = 0
    kv = torch.zeros(PAGES, 2, PAGE_SIZE, 1, 28 if dtype == torch.int8 else 24, dtype=dtype)
    with using(isa):
        inputs.run(rope_store, kv)
    heads = kv[inputs.locations // PAGE_SIZE, 1, inputs.locations % PAGE_SIZE, 0]
    if dtype == torch.int8:
        scales = heads[:, 24:].contiguous().view(torch.float32).flatten()
        assert scales.isnan().tolist() == [True, True, False, False, False]
        assert float(scales[2]) == 0
        assert not heads[2, :24].any()
    else:
        assert heads.isnan().nonzero().tolist() == [[0, 17]]
        assert heads.isinf().nonzero().tolist() == [[1, 3]]
        assert not heads[2].any()


@every_isa
def test_token_does_not_depend_on_others(isa: str) -> None:
    inputs = _Inputs(9, 3, 64, 64, True)
    kv = torch.zeros(PAGES, 2, PAGE_SIZE, 3, 68, dtype=torch.int8)
    alone = kv.clone()
    with using(isa, threads=3):
        together, _, _ = inputs.run(rope_store, kv)
        fused, positions, locations = inputs.fused, inputs.positions, inputs.locations
        for i in range(TOKENS):
            one = slice(i, i + 1)
            inputs.fused, inputs.positions, inputs.locations = fused[one], positions[one], locations[one]
            assert torch.equal(inputs.run(rope_store, alone)[0], together[one])
    assert torch.equal(alone, kv)


def test_bfloat16_rounds_as_torch_does() -> None:
    """Every exponent and the halves between two neighbours, through a layer without rotation."""
    bits = torch.arange(0, 2**31 - 2**23, 32_749, dtype=torch.int32)
    x = torch.cat((bits.view(torch.float32), (bits & ~0xFFFF | 0x8000).view(torch.float32)))
    x = torch.cat((x, -x))[: len(x) * 2 // 256 * 256].view(-1, 1, 256)
    cos_sin = torch.cat((torch.ones(1, 128), torch.zeros(1, 128)), -1)
    tokens = len(x)
    zeros = torch.zeros(tokens, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16):
        kv = torch.zeros(tokens, 2, 1, 1, 256, dtype=dtype)
        rope_store(x.clone(), x, x, zeros, cos_sin, kv, torch.arange(tokens), None, None, 1e-6)
        assert torch.equal(kv[:, 1, 0, 0], x[:, 0].to(dtype))


@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_alone(normed: bool) -> None:
    inputs = _Inputs(0, 3, 64, 64, normed)
    expected, kv = torch.zeros(PAGES, 2, PAGE_SIZE, 3, 64), torch.zeros(PAGES, 2, PAGE_SIZE, 3, 64)
    inputs.run(reference.rope_store, expected)
    with using():
        inputs.run(rope_store, kv)
    assert kv.any()
    torch.testing.assert_close(kv, expected, rtol=1e-5, atol=1e-5)
