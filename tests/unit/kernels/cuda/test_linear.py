"""The small products against torch, for every configuration; the choice among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as reference
from kernels.cuda.context import Context, make_context
from kernels.cuda.linear import GatedLinear, Linear
from kernels.cuda.small_gemm_launch import MAX_TOKENS, TOKEN_CLASSES, Tile, configs, default_name
from kernels.cuda.tuning import Key, Tuner

OPS = [(Linear, reference.linear), (GatedLinear, reference.gated_linear)]

# The interpreter multiplies the codes of bfloat16 as if they were integers.
DTYPES = [torch.float16, torch.bfloat16] if torch.cuda.is_available() else [torch.float16]


class Picker(Tuner):
    """Chooses by a name given, and tells what it was asked."""

    def __init__(self, device: torch.device, name: str) -> None:
        super().__init__(device, None)
        self.name = name
        self.asked: list[tuple[str, Key, set[str], str]] = []

    def choose(self, op: str, key: Key, candidates: Mapping[str, Callable[[], object]], default: str) -> str:
        self.asked.append((op, key, set(candidates), default))
        return self.name or default


def picking(device: torch.device, name: str = "") -> tuple[Context, Picker]:
    picker = Picker(device, name)
    return make_context(device, picker), picker


def among_nans(rows: int, cols: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """A matrix of random numbers whose neighbours in memory must not be read."""
    generator = torch.Generator().manual_seed(seed)
    around = torch.full((rows + 2, cols + 5), torch.nan)
    around[:rows, :cols] = torch.randn(rows, cols, generator=generator) / cols**0.25
    return around.to(dtype).to(device)[:rows, :cols]


def close(out: Tensor, expected: Tensor) -> bool:
    distance = (out.double().cpu() - expected.double().cpu()).norm()
    limit = 2e-3 if out.dtype == torch.float16 else 1e-2
    return bool(distance <= limit * expected.double().cpu().norm())


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "torch_way"), OPS)
def test_every_configuration_is_the_product(
    kernel: type[Linear], torch_way: Callable, dtype: torch.dtype, num_tokens: int, device: torch.device
) -> None:
    context, _ = picking(device)
    product = kernel(context)
    for out_dim, in_dim, biased in ((18, 131, True), (24, 576, False)):
        x = among_nans(num_tokens, in_dim, dtype, device, seed=1)
        weight = among_nans(out_dim, in_dim, dtype, device, seed=2)
        bias = torch.randn(out_dim, generator=torch.Generator().manual_seed(3)).to(dtype).to(device) if biased else None
        expected = torch_way(x.float(), weight.float(), None if bias is None else bias.float())
        for name, candidate in product.candidates(num_tokens).items():
            out = candidate(x, weight, bias)
            assert out.dtype == dtype and out.shape == expected.shape
            assert close(out, expected), (name, out_dim, in_dim)


@pytest.mark.parametrize(("out_dim", "in_dim"), [(1, 32), (2, 33), (3, 96), (16, 1280), (18, 1056)])
def test_any_dimensions(out_dim: int, in_dim: int, device: torch.device) -> None:
    context, _ = picking(device)
    x = among_nans(3, in_dim, torch.float16, device, seed=4)
    weight = among_nans(out_dim, in_dim, torch.float16, device, seed=5)
    for name, candidate in Linear(context).candidates(3).items():
        assert close(candidate(x, weight, None), x.float() @ weight.float().T), name
    if out_dim % 2 == 0:
        for name, candidate in GatedLinear(context).candidates(3).items():
            assert close(candidate(x, weight, None), reference.gated_linear(x.float(), weight.float(), None)), name


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 9, 20])
def test_only_the_result_is_written(num_tokens: int, gated: bool, device: torch.device) -> None:
    results = 11
    x = among_nans(num_tokens, 64, torch.float16, device, seed=6)
    weight = among_nans(2 * results if gated else results, 64, torch.float16, device, seed=7)
    context, _ = picking(device)
    for name, config in configs(num_tokens, gated=gated).items():
        around = torch.full((num_tokens + 2, results + 7), torch.nan, dtype=torch.float16, device=device)
        config.launch(x, weight, None, around[:num_tokens, :results], context.tickets, gated=gated, pdl=False)
        assert not around[:num_tokens, :results].isnan().any(), name
        assert around[num_tokens:].isnan().all() and around[:, results:].isnan().all(), name


@pytest.mark.parametrize("most", [8, 16, 32, 64])
def test_a_token_does_not_depend_on_the_others(most: int, device: torch.device) -> None:
    x = among_nans(most, 300, torch.float16, device, seed=8)
    weight = among_nans(24, 300, torch.float16, device, seed=9)
    context, _ = picking(device)
    fewest = {8: 2, 16: 9, 32: 17, 64: 33}[most]
    for name, candidate in Linear(context).candidates(most).items():
        if name != "torch":
            assert torch.equal(candidate(x, weight, None)[:fewest], candidate(x[:fewest], weight, None)), name


@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_beyond_numbers_stay_in_their_places(device: torch.device) -> None:
    x = among_nans(4, 70, torch.float16, device, seed=10)
    x[1, 3] = torch.nan
    weight = among_nans(20, 70, torch.float16, device, seed=11)
    weight[7, 69] = torch.inf
    expected = torch.nn.functional.linear(x.float(), weight.float())
    context, _ = picking(device)
    for name, candidate in Linear(context).candidates(4).items():
        out = candidate(x, weight, None)
        assert torch.equal(out.isnan(), expected.isnan()) and torch.equal(out.isinf(), expected.isinf()), name


@pytest.mark.parametrize(("kernel", "torch_way"), OPS)
def test_the_choice(kernel: type[Linear], torch_way: Callable, device: torch.device) -> None:
    x = among_nans(MAX_TOKENS + 1, 48, torch.float16, device, seed=12)
    weight = among_nans(20, 48, torch.float16, device, seed=13).contiguous()
    context, picker = picking(device)
    product = kernel(context)
    for num_tokens in (0, 1, 7, 8, 9, 17, 33, 65, 129):
        out = product(x[:num_tokens], weight, None)
        expected = torch_way(x[:num_tokens].float(), weight.float(), None)
        assert out.shape == expected.shape and close(out, expected)
    assert [key[0] for _, key, _, _ in picker.asked] == [1, 8, 8, 16, 32, 64, 128]
    assert {op for op, _, _, _ in picker.asked} == {kernel.op}
    assert all("torch" in names and default in names - {"torch"} for _, _, names, default in picker.asked)


def test_the_default_is_torch_where_there_are_no_wide_loads(device: torch.device) -> None:
    context, picker = picking(device)
    x = torch.randn(2, 96, device=device, dtype=torch.float16)
    weight = torch.randn(20, 96, device=device, dtype=torch.float16)
    Linear(context)(x[:, :90], weight[:, :90], None)
    Linear(context)(x[:, :80], weight[:, :90].contiguous()[:, :80], None)
    assert [default for _, _, _, default in picker.asked] == ["torch", "torch"]


def test_torch_when_it_is_chosen_and_for_fp32(device: torch.device) -> None:
    x = torch.randn(2, 48, device=device, dtype=torch.float16)
    weight = torch.randn(20, 48, device=device, dtype=torch.float16)
    context, picker = picking(device, "torch")
    product = Linear(context)
    assert torch.equal(product(x, weight, None), torch.nn.functional.linear(x, weight))
    assert len(picker.asked) == 1
    assert torch.equal(product(x.float(), weight.float(), None), torch.nn.functional.linear(x.float(), weight.float()))
    assert len(picker.asked) == 1


def test_the_key_tells_shapes_apart(device: torch.device) -> None:
    context, picker = picking(device, "torch")
    product = Linear(context)
    x = torch.zeros(2, 48, device=device, dtype=torch.float16)
    for weight, bias in (
        (x.new_zeros(20, 48), None),
        (x.new_zeros(21, 48), None),
        (x.new_zeros(20, 48), x.new_zeros(20)),
    ):
        product(x, weight, bias)
    product(x[:, :32], x.new_zeros(20, 32), None)
    product(x.bfloat16(), x.new_zeros(20, 48).bfloat16(), None)
    assert len({key for _, key, _, _ in picker.asked}) == 5


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 16, 17, 32, 33, 64])
def test_few_are_tried_the_default_among_them(num_tokens: int, gated: bool) -> None:
    found = configs(num_tokens, gated=gated)
    assert default_name(num_tokens) in found
    assert len(found) < 8


def test_no_configuration_is_lost() -> None:
    for tokens in TOKEN_CLASSES:
        plain, gated = configs(tokens, gated=False), configs(tokens, gated=True)
        assert gated.items() <= plain.items() and "torch" not in plain


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_a_sum_are_put_together_again_and_again(gated: bool, device: torch.device) -> None:
    tile = Tile(rows=16, depth=32, stages=2, warps=4, programs=4, ahead=0)
    dtype = torch.float16
    x = among_nans(3, 328, dtype, device, seed=14)
    weight = among_nans(72, 328, dtype, device, seed=15)
    bias = torch.randn(72, generator=torch.Generator().manual_seed(16)).to(dtype).to(device)
    results = 36 if gated else 72
    assert tile.parts(5, 328) == 4
    context, _ = picking(device)
    expected = (reference.gated_linear if gated else reference.linear)(x.float(), weight.float(), bias.float())
    for _ in range(2):
        out = torch.full((3, results), torch.nan, dtype=dtype, device=device)
        tile.launch(x, weight, bias, out, context.tickets, gated=gated, pdl=False)
        assert close(out, expected)
        assert not context.tickets.any()


def test_parts_are_worth_their_sum() -> None:
    tile = Tile(rows=64, depth=64, stages=5, warps=4, programs=4, ahead=0)
    assert tile.parts(64, 4096) == 8
    assert tile.parts(96, 4096) == 4
    assert tile.parts(448, 4096) == 1
    assert tile.parts(2004, 4096) == 1
    assert tile.parts(16, 1024) == 2
    assert tile.parts(1, 32) == 1
    wide = Tile(256, 64, 4, 16, 1, 256)
    assert wide.parts(16, 4096) == 8 and wide.parts(16, 4096, gated=True) == 1


def test_what_the_kernels_do_not_take_is_for_torch(device: torch.device) -> None:
    context, picker = picking(device)
    product = Linear(context)
    wide = torch.randn(3, 96, device=device).half()
    x, weight = wide[:, ::2], torch.randn(20, 48, device=device).half()
    torch.testing.assert_close(product(x, weight, None), F.linear(x, weight))
    assert not picker.asked
