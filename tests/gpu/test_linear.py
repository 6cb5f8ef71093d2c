"""The small products of real models' shapes on a CUDA device: every configuration against fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import linear as reference
from kernels.cuda.context import Context, make_context
from kernels.cuda.linear import GatedLinear, Linear
from kernels.cuda.tuning import Tuner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")

# (out_dim, in_dim) of Llama-3.1-8B and Qwen3-0.6B: qkv, o, down; and of others, with odd remainders.
SHAPES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (4096, 1024),
    (1024, 2048),
    (1024, 3072),
    (960, 576),
    (2560, 9728),
    (1000, 1432),
    (50, 100),
]
# As above, but gate_up.
GATED_SHAPES = [(28672, 4096), (6144, 1024), (3072, 576), (1000, 1432), (50, 100)]
HEADS = [(128256, 4096), (151936, 1024)]
NUM_TOKENS = [1, 2, 8, 13, 16, 32, 50]


@pytest.fixture(scope="module")
def context() -> Context:
    return make_context(CUDA, Tuner(CUDA, None))


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.float32).to(dtype)


def distance(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("out_dim", "in_dim"), SHAPES)
def test_shapes_of_models(context: Context, out_dim: int, in_dim: int) -> None:
    check(Linear(context), reference.linear, out_dim, in_dim)


@pytest.mark.parametrize(("out_dim", "in_dim"), GATED_SHAPES)
def test_gated_shapes_of_models(context: Context, out_dim: int, in_dim: int) -> None:
    check(GatedLinear(context), reference.gated_linear, out_dim, in_dim)


def check(product: Linear, wanted: Callable, out_dim: int, in_dim: int) -> None:
    weight = random(out_dim, in_dim, seed=1) / in_dim**0.5
    # Each kernel is compiled for both, so no shape has both.
    bias = random(out_dim, seed=2) if out_dim <= 1024 else None
    for num_tokens in NUM_TOKENS:
        x = random(num_tokens, in_dim, seed=3)
        expected = wanted(x.float(), weight.float(), None if bias is None else bias.float())
        for name, candidate in product.candidates(num_tokens).items():
            assert distance(candidate(x, weight, bias), expected) < 6e-3, (name, num_tokens)


def test_tickets_are_zeros_again(context: Context) -> None:
    weight, x = random(1024, 4096, seed=1), random(16, 4096, seed=2)
    for num_tokens in (8, 16):
        for candidate in Linear(context).candidates(num_tokens).values():
            candidate(x[:num_tokens], weight, None)
    assert not context.tickets.any()


@pytest.mark.parametrize(("out_dim", "in_dim"), HEADS)
def test_heads(context: Context, out_dim: int, in_dim: int) -> None:
    weight = random(out_dim, in_dim, seed=1) / in_dim**0.5
    product = Linear(context)
    for num_tokens in (1, 8, 16, 32, 64):
        x = random(num_tokens, in_dim, seed=3)
        expected = F.linear(x.float(), weight.float())
        for name, candidate in product.candidates(num_tokens).items():
            assert distance(candidate(x, weight, None), expected) < 6e-3, (name, num_tokens)


@pytest.mark.parametrize(("out_dim", "in_dim"), [(4096, 4096), (1024, 3072)])
def test_repeated_calls_agree_to_the_bit_whatever_the_number_of_tokens(
    context: Context, out_dim: int, in_dim: int
) -> None:
    weight = random(out_dim, in_dim, seed=1)
    x = random(64, in_dim, seed=3)
    for most, fewer in ((8, (2, 5, 8)), (16, (9, 16)), (32, (17, 32)), (64, (33, 64))):
        for name, candidate in Linear(context).candidates(most).items():
            if name == "torch":
                continue
            first = candidate(x[:most], weight, None)
            for num_tokens in fewer:
                for _ in range(10):
                    assert torch.equal(candidate(x[:num_tokens], weight, None), first[:num_tokens]), (name, num_tokens)


def test_rows_that_are_parts_of_wider_ones(context: Context) -> None:
    wide_x, wide_weight = random(5, 3000, seed=4), random(300, 2500, seed=5)
    x, weight = wide_x[:, 8:2056], wide_weight[:, 16:2064]
    for name, candidate in Linear(context).candidates(5).items():
        assert distance(candidate(x, weight, None), x.float() @ weight.float().T) < 6e-3, name


def test_the_choice_is_measured_and_then_captured(context: Context) -> None:
    weight = random(2048, 1024, seed=1) / 32
    x = random(3, 1024, seed=2)
    product = Linear(context)
    product(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(x, weight, None)
    x.copy_(random(3, 1024, seed=3))
    out.fill_(torch.nan)
    graph.replay()
    assert distance(out, F.linear(x.float(), weight.float())) < 6e-3


@pytest.mark.parametrize("num_tokens", [1, 4, 16, 32])
@pytest.mark.parametrize("captured", [False, True])
def test_starting_before_the_kernel_before_has_ended_changes_nothing(
    context: Context, captured: bool, num_tokens: int
) -> None:
    """Chains in which each product's activations are the result of the kernel right before it, and memory is reused."""
    dim, layers = 2048, 24
    weights = [random(dim, dim, seed=layer) / dim**0.5 for layer in range(layers)]
    gates = [random(2 * dim, dim, seed=100 + layer) / dim**0.5 for layer in range(layers)]
    x = random(num_tokens, dim, seed=3)

    def chain(linear: Linear, gated: GatedLinear, name: str) -> Tensor:
        hidden = x
        for weight, gate in zip(weights, gates, strict=True):
            hidden = hidden + linear.candidates(num_tokens)[name](hidden, weight, None)
            hidden = hidden + gated.candidates(num_tokens)[name](hidden, gate, None)
            hidden = linear.candidates(num_tokens)[name](hidden, weight, None)
            hidden = hidden / hidden.abs().amax()
        return hidden

    for name in GatedLinear(context).candidates(num_tokens).keys() - {"torch"}:
        plain = chain(Linear(context, pdl=False), GatedLinear(context, pdl=False), name)
        early = (Linear(context, pdl=True), GatedLinear(context, pdl=True))
        out = chain(*early, name)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = chain(*early, name)
            for _ in range(5):
                out.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(out, plain), name
        assert torch.equal(out, plain) and not out.isnan().any(), name
