"""Kernels of fixed order at real sizes: the same bits for a token in every step."""

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
from kernels.cuda.logprobs import score_tokens
from kernels.cuda.norm import add_rms_norm, rms_norm
from kernels.cuda.rope_store import FEW_TOKENS, rope_store
from kernels.cuda.tuning import Tuner
from kernels.dispatch import select
from tests.support.attention_cases import make_case, plain_attention, relative_error
from tests.support.tiny_models import write_tiny_model
from tests.unit.kernels.fixed_cases import ASKED, among_others, in_chunks, logits_of_every_way
from tests.unit.models.paging import decoder_from, spec_in

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda")

# (out_dim, in_dim) of Llama-3.1-8B and Qwen3-0.6B: qkv, o, down, head; and odd ones.
SHAPES = [(6144, 4096), (4096, 14336), (128256, 4096), (4096, 1024), (1024, 3072), (1000, 1432)]
GATED_SHAPES = [(28672, 4096), (6144, 1024), (1000, 1432)]
HEADS = {"32/8x128": ((32, 8), 128), "16/8x128": ((16, 8), 128), "9/3x64": ((9, 3), 64), "16/2x256": ((16, 2), 256)}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


def random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_dim", "in_dim"), SHAPES)
def test_linear(out_dim: int, in_dim: int, dtype: torch.dtype) -> None:
    check_product(fixed_linear.linear, reference.linear, out_dim, in_dim, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("out_dim", "in_dim"), GATED_SHAPES)
def test_gated_linear(out_dim: int, in_dim: int, dtype: torch.dtype) -> None:
    check_product(fixed_linear.gated_linear, reference.gated_linear, out_dim, in_dim, dtype)


def check_product(product: Callable, wanted: Callable, out_dim: int, in_dim: int, dtype: torch.dtype) -> None:
    weight = (random(out_dim, in_dim, seed=1) / in_dim**0.5).to(dtype)
    bias = random(out_dim, seed=2, dtype=dtype) if out_dim <= 4096 else None
    x = random(300, in_dim, seed=3, dtype=dtype)
    together = product(x, weight, bias)
    expected = wanted(x[:40].double(), weight.double(), None if bias is None else bias.double())
    assert relative_error(together[:40], expected) < TOLERANCE[dtype]
    for num_tokens in (1, 2, 8, 17, 63, 64, 65, 128, 299):
        assert torch.equal(product(x[:num_tokens], weight, bias), together[:num_tokens]), num_tokens
        assert torch.equal(product(x[-num_tokens:], weight, bias), together[-num_tokens:]), num_tokens


@pytest.mark.parametrize("num_tokens", [1025, 8192])
def test_products_of_long_prompts(num_tokens: int) -> None:
    x, weight = random(num_tokens, 4096, seed=3), random(6144, 4096, seed=1) / 64
    together = fixed_linear.linear(x, weight, None)
    gated = fixed_linear.gated_linear(x, weight, None)
    for token in (0, 63, 64, 1000, num_tokens - 1):
        one = slice(token, token + 1)
        assert torch.equal(fixed_linear.linear(x[one], weight, None), together[one])
        assert torch.equal(fixed_linear.gated_linear(x[one], weight, None), gated[one])


def make_attention() -> FixedAttention:
    return FixedAttention(make_context(CUDA, Tuner(CUDA, None)))


@pytest.mark.parametrize(
    ("heads", "window", "dtype"),
    [
        *((name, None, torch.bfloat16) for name in HEADS),
        ("32/8x128", 1000, torch.bfloat16),
        ("32/8x128", None, torch.float16),
        ("32/8x128", None, torch.float32),
    ],
)
def test_attention(heads: str, window: int | None, dtype: torch.dtype) -> None:
    """However a prompt is cut, paged and batched."""
    numbers, head_dim = HEADS[heads]
    attention, spec = make_attention(), AttentionSpec(head_dim**-0.5, window)
    length = 3000 if dtype != torch.float32 else 1300
    kinds = {"heads": numbers, "head_dim": head_dim, "dtype": dtype, "device": CUDA}
    case = make_case([(length, length)], page_size=64, **kinds)
    whole = attention(case.q, case.kv, case.batch, spec)
    assert relative_error(whole, plain_attention(case, spec)[0]) < TOLERANCE[dtype]
    for chunk, first in ((1, length - 150), (7, length - 500), (64, 0), (333, 0), (1024, 0)):
        assert torch.equal(in_chunks(attention, case, spec, chunk, first), whole[first:]), chunk
    for page_size in (1, 16, 256):
        other = make_case([(length, length)], page_size=page_size, **kinds)
        assert torch.equal(attention(other.q, other.kv, other.batch, spec), whole), page_size
        first = length - 40
        assert torch.equal(in_chunks(attention, other, spec, 1, first), whole[first:]), page_size
    others = [(1, 30), (1, length), (0, 0), (1, 1), (1, 700), (1, 129)]
    for row in ((1, 1234), (300, 1100)):
        for found in among_others(attention, case, spec, row, others):
            assert torch.equal(found, whole[row[1] - row[0] : row[1]])
    for found in among_others(attention, case, spec, (1, 1234), [(1, 30 + 9 * i) for i in range(100)])[::25]:
        assert torch.equal(found, whole[1233:1234])


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_attention_over_eight_bit_pages(kv_dtype: torch.dtype) -> None:
    attention, spec = make_attention(), AttentionSpec(128**-0.5, softcap=20.0, k_scale=0.7, v_scale=1.9)
    case = make_case([(900, 900)], heads=(32, 8), head_dim=128, dtype=torch.bfloat16, kv_dtype=kv_dtype, device=CUDA)
    whole = attention(case.q, case.kv, case.batch, spec)
    assert relative_error(whole, plain_attention(case, spec)[0]) < 1e-2
    for found in among_others(attention, case, spec, (1, 800), [(1, 30), (300, 700), (1, 1)]):
        assert torch.equal(found, whole[799:800])


def test_attention_in_a_graph() -> None:
    case = make_case([(1, 3000)] * 4, heads=(32, 8), head_dim=128, dtype=torch.bfloat16, device=CUDA)
    attention, spec = make_attention(), AttentionSpec(128**-0.5)
    before = attention(case.q, case.kv, case.batch, spec)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(case.q, case.kv, case.batch, spec)
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, before)


@pytest.mark.parametrize("heads", HEADS)
def test_heads_are_normed_the_same_in_every_step(heads: str) -> None:
    """Programs have more heads where there are many tokens: that must not change how a head is summed up."""
    (num_heads, num_kv_heads), head_dim = HEADS[heads]
    num_tokens, width = FEW_TOKENS + 88, num_heads + 2 * num_kv_heads
    qkv = random(num_tokens, width, head_dim, seed=1)
    angles = random(num_tokens, head_dim // 2, seed=2, dtype=torch.float32)
    cache = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = random(2, head_dim, seed=3)
    places = torch.arange(num_tokens, device=CUDA)

    def run(start: int, end: int) -> tuple[Tensor, Tensor]:
        part = qkv[start:end].clone()
        q, k, v = part.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        kv = torch.zeros(40, 2, 16, num_kv_heads, head_dim, dtype=qkv.dtype, device=CUDA)
        rope_store(q, k, v, places[start:end], cache, kv, places[start:end], norms[0], norms[1], 1e-6)
        return q, kv.transpose(1, 2).reshape(-1, 2, num_kv_heads, head_dim)[start:end]

    q, kv = run(0, num_tokens)
    for start, end in ((0, 1), (5, 300), (0, FEW_TOKENS), (num_tokens - 1, num_tokens)):
        some_q, some_kv = run(start, end)
        assert torch.equal(some_q, q[start:end]) and torch.equal(some_kv, kv[start:end])


@pytest.mark.parametrize("dim", [1024, 4096, 5120])
def test_rows_are_normed_the_same_in_every_step(dim: int) -> None:
    x, residual, weight = random(300, dim, seed=1), random(300, dim, seed=2), random(dim, seed=3)
    normed = rms_norm(x, weight, 1e-6)
    added, total = add_rms_norm(x, residual.clone(), weight, 1e-6)
    for rows in (slice(0, 1), slice(7, 20), slice(299, 300)):
        assert torch.equal(rms_norm(x[rows], weight, 1e-6), normed[rows])
        some, some_total = add_rms_norm(x[rows], residual[rows].clone(), weight, 1e-6)
        assert torch.equal(some, added[rows]) and torch.equal(some_total, total[rows])


@pytest.mark.parametrize("vocab", [128256, 151936])
def test_scores_are_the_same_whoever_wants_more(vocab: int) -> None:
    logits = random(300, vocab, seed=1)
    tokens = torch.arange(300, device=CUDA) * 31
    alone, _, _ = score_tokens(logits, tokens, 0)
    for width in (0, 1, 20):
        for rows in (slice(0, 1), slice(5, 40), slice(0, 300)):
            assert torch.equal(score_tokens(logits[rows], tokens[rows], width)[0], alone[rows]), (width, rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 192}),
        ("qwen3", {"head_dim": 128, "hidden_size": 256}),
        ("mistral", {"head_dim": 64, "sliding_window": 100}),
    ],
)
def test_decoders(family: str, overrides: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """The logits of a token are the same to the bit, whatever else is in its steps."""
    directory = write_tiny_model(tmp_path, family, tokenizer=False, **overrides)
    spec, tensors = spec_in(directory), load_file(directory / "model.safetensors")
    decoder = decoder_from(spec, tensors, select("cuda", dtype, ASKED), device="cuda", dtype=dtype)
    ids = torch.randint(0, spec.vocab_size, (250,), generator=torch.Generator().manual_seed(1))
    found = logits_of_every_way(decoder, ids, decode_from=200)
    assert [way for way, logits in found.items() if not torch.equal(logits, found["at once"])] == []
