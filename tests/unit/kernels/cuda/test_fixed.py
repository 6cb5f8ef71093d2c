"""Products and attention of fixed order: the same bits in every step, and the right ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels import linear as reference
from kernels.attention import AttentionSpec
from kernels.cuda import fixed_linear
from kernels.cuda.context import make_context
from kernels.cuda.fixed_attention import FixedAttention
from kernels.cuda.tuning import Tuner
from kernels.dispatch import select
from tests.support.attention_cases import make_case, plain_attention, relative_error
from tests.support.tiny_models import write_tiny_model
from tests.unit.kernels.fixed_cases import ASKED, among_others, in_chunks, logits_of_every_way
from tests.unit.models.paging import decoder_from, run_one, spec_in

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in (log2|exp2):RuntimeWarning")

OPS = [(fixed_linear.linear, reference.linear), (fixed_linear.gated_linear, reference.gated_linear)]
# The interpreter multiplies the codes of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}

SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=50),
    "softcap": AttentionSpec(0.3, softcap=2.0),
    "sinks": AttentionSpec(0.3, window=9, sinks=torch.linspace(-3.0, 3.0, 4)),
}


def random(*shape: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.25
    return made.to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_dim", "in_dim", "biased"), [(18, 131, True), (200, 128, False), (2, 1, True)])
@pytest.mark.parametrize(("product", "torch_way"), OPS)
def test_products(
    product: Callable,
    torch_way: Callable,
    out_dim: int,
    in_dim: int,
    biased: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Rows are parts of wider ones, whose neighbours must not be read."""
    for num_tokens in (0, 1, 67):
        x = torch.full((num_tokens + 1, in_dim + 3), torch.nan, dtype=dtype, device=device)[:num_tokens, :in_dim]
        x.copy_(random(num_tokens, in_dim, seed=1, dtype=dtype, device=device))
        weight = torch.full((out_dim + 1, in_dim + 5), torch.nan, dtype=dtype, device=device)[:out_dim, :in_dim]
        weight.copy_(random(out_dim, in_dim, seed=2, dtype=dtype, device=device))
        bias = random(out_dim, seed=3, dtype=dtype, device=device) if biased else None
        out = product(x, weight, bias)
        expected = torch_way(x.double(), weight.double(), None if bias is None else bias.double())
        assert out.shape == expected.shape and out.dtype == dtype and out.is_contiguous()
        assert num_tokens == 0 or relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("product", [fixed_linear.linear, fixed_linear.gated_linear])
@pytest.mark.parametrize("many_rows", [100, 1000])
def test_products_of_a_token(
    product: Callable, many_rows: int, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With either tile, whichever tokens are beside it and in whatever order tiles are taken."""
    monkeypatch.setattr(fixed_linear, "MANY_ROWS", many_rows)
    x = random(200, 72, seed=4, dtype=dtype, device=device)
    weight = random(100, 72, seed=5, dtype=dtype, device=device)
    together = product(x, weight, None)
    for num_tokens in (1, 64, 65):
        assert torch.equal(product(x[:num_tokens], weight, None), together[:num_tokens])
    for token in (1, 63, 199):
        assert torch.equal(product(x[token : token + 1], weight, None)[0], together[token])
    order = torch.randperm(200, generator=torch.Generator().manual_seed(6)).to(device)
    assert torch.equal(product(x[order], weight, None), together[order])
    monkeypatch.setattr(fixed_linear, "GROUP", 2)
    assert torch.equal(product(x, weight, None), together)


@pytest.fixture
def attention(device: torch.device) -> FixedAttention:
    return FixedAttention(make_context(device, Tuner(device, None)))


def spec_of(name: str, device: torch.device) -> AttentionSpec:
    spec = SPECS[name]
    sinks = None if spec.sinks is None else spec.sinks.to(device)
    return AttentionSpec(spec.scale, spec.window, spec.softcap, sinks)


@pytest.mark.parametrize(
    ("spec_name", "dtype"),
    [
        *((name, DTYPES[-1]) for name in SPECS),
        *(pytest.param(name, torch.float32, marks=pytest.mark.slow) for name in ("plain", "sinks")),
    ],
)
def test_attention_of_a_token(
    spec_name: str, dtype: torch.dtype, device: torch.device, attention: FixedAttention
) -> None:
    """However it is cut, paged and batched."""
    spec = spec_of(spec_name, device)
    case = make_case([(90, 90)], heads=(4, 1), page_size=16, dtype=dtype, device=device)
    whole = attention(case.q, case.kv, case.batch, spec)
    assert relative_error(whole, plain_attention(case, spec)[0]) < TOLERANCE[dtype]
    for chunk, first in ((1, 60), (3, 50), (7, 0), (40, 0)):
        assert torch.equal(in_chunks(attention, case, spec, chunk, first), whole[first:]), chunk
    for page_size in (1, 4, 64, 256):
        other = make_case([(90, 90)], heads=(4, 1), page_size=page_size, dtype=dtype, device=device)
        assert torch.equal(attention(other.q, other.kv, other.batch, spec), whole), page_size
    for row, others in (((1, 71), [(1, 30), (1, 89)]), ((20, 80), [(5, 90), (0, 0), (1, 1)])):
        for found in among_others(attention, case, spec, row, others):
            assert torch.equal(found, whole[row[1] - row[0] : row[1]])


def test_attention_with_eight_bit_pages_and_odd_heads(device: torch.device, attention: FixedAttention) -> None:
    kinds = {"dtype": torch.float16, "kv_dtype": torch.float8_e5m2}
    case = make_case([(90, 90)], heads=(6, 2), head_dim=24, page_size=7, device=device, **kinds)
    spec = AttentionSpec(0.3, k_scale=0.5, v_scale=2.0)
    whole = attention(case.q, case.kv, case.batch, spec)
    assert relative_error(whole, plain_attention(case, spec)[0]) < 1e-3
    for found in among_others(attention, case, spec, (1, 80), [(30, 70), (1, 20)]):
        assert torch.equal(found, whole[79:80])


@pytest.mark.parametrize("tree", [False, True])
def test_attention_of_every_batch(tree: bool, device: torch.device, attention: FixedAttention) -> None:
    """Prefixes that could be shared, trees and empty rows."""
    case = make_case([(1, 70), (2, 75), (1, 9), (4, 0), (30, 140)], prefix=[(2, 64), (3, 0)], tree=tree, device=device)
    spec = AttentionSpec(0.3, window=40)
    lse = torch.full(case.q.shape[:2], torch.nan, device=device)
    out = attention(case.q, case.kv, case.batch, spec, lse)
    expected, expected_lse = plain_attention(case, spec)
    assert relative_error(out, expected) < 2e-6
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_a_chain_is_a_prompt(device: torch.device, attention: FixedAttention) -> None:
    """Drafted tokens that follow one another get the bits that they would get one by one."""
    case = make_case([(9, 100)], heads=(4, 1), tree=True, dtype=torch.float16, device=device)
    tree = case.batch.tree
    assert tree is not None
    tree.visible[:, :9] = torch.ones(9, 9, device=device).tril().bool()
    tree.depths.copy_(torch.arange(9))
    chain = attention(case.q, case.kv, case.batch, AttentionSpec(0.3))
    plain = make_case([(9, 100)], heads=(4, 1), dtype=torch.float16, device=device)
    assert torch.equal(chain, attention(plain.q, plain.kv, plain.batch, AttentionSpec(0.3)))


def test_chosen_only_when_asked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    context = make_context(device, Tuner(device, None))
    chosen = select("cuda", torch.bfloat16, ASKED, context=context)
    assert chosen.linear is fixed_linear.linear and chosen.gated_linear is fixed_linear.gated_linear
    assert isinstance(chosen.paged_attention, FixedAttention)
    usual = select("cuda", torch.bfloat16, "", context=context)
    assert "fixed" not in usual.linear.__module__ + usual.gated_linear.__module__ + usual.paged_attention.__module__
    with pytest.raises(ValueError, match=r"'fixed' of op .* does not serve cpu"):
        select("cpu", torch.float32, ASKED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "overrides"), [("qwen3", {"head_dim": 64}), ("mistral", {"head_dim": 64, "sliding_window": 20})]
)
def test_decoders(
    family: str, overrides: dict[str, Any], device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of a token are the same to the bit, whatever else is in its steps."""
    if device.type == "cpu":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    kernels = select("cuda", torch.float32, ASKED, context=make_context(device, Tuner(device, None)))
    directory = write_tiny_model(tmp_path, family, tokenizer=False, **overrides)
    spec, tensors = spec_in(directory), load_file(directory / "model.safetensors")
    ids = torch.randint(0, spec.vocab_size, (30,), generator=torch.Generator().manual_seed(1))
    decoder = decoder_from(spec, tensors, kernels, device=device.type)
    found = logits_of_every_way(decoder, ids, decode_from=24)
    torch.testing.assert_close(found["at once"].cpu(), run_one(decoder_from(spec, tensors), ids), atol=1e-4, rtol=1e-4)
    assert [way for way, logits in found.items() if not torch.equal(logits, found["at once"])] == []
