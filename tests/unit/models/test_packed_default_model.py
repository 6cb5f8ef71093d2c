"""The default model with its weights as the file packs them, against the same weights in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.model_files.resolve import resolve
from engine.tokenizer.load import load_tokenizer
from kernels.attention import AttentionBatch
from kernels.cpu import native
from kernels.dispatch import select
from scheduler_proc.layers.packed import Packed
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import spec_of
from scheduler_proc.weights.load import load_weights
from tests.support.packed import needs_kernels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_kernels]

WINDOW, WINDOWS, PAGE = 1024, 4, 16
DOCS = Path(__file__).parents[3] / "docs"


def _logits(decoder: Decoder, ids: Tensor, kv_dtype: torch.dtype) -> Tensor:
    """float32 `[len(ids), vocab]` of one sequence in one pass."""
    num_tokens, shape = len(ids), decoder.kv_shape
    pages = -(-num_tokens // PAGE)
    extra = 4 if kv_dtype == torch.int8 else 0
    kv = [
        torch.zeros(pages, 2, PAGE, shape.num_kv_heads, shape.head_dim + extra, dtype=kv_dtype)
        for _ in range(shape.num_layers)
    ]
    table = torch.arange(pages, dtype=torch.int32)[None]
    batch = AttentionBatch(np.array([num_tokens], np.int32), torch.tensor([num_tokens]), num_tokens, table, PAGE)
    positions = torch.arange(num_tokens)
    return decoder.logits(decoder.forward(ids, positions, batch, positions, kv))


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]


@torch.inference_mode()
def test_perplexity_is_within_half_a_percent() -> None:
    files = resolve(None)
    text = "\n".join((DOCS / name).read_text() for name in ("decisions.md", "scheduling.md", "architecture.md"))
    ids = torch.tensor(load_tokenizer(files).encode(text, add_special_tokens=False))[: WINDOW * WINDOWS]
    assert len(ids) == WINDOW * WINDOWS
    spec = spec_of(files.config)
    torch.set_num_threads(2)
    native.set_threads(2)
    dense = Decoder(spec, select("cpu", torch.float32, ""), "cpu", torch.float32, max_position=WINDOW)
    kernels = select("cpu", torch.float32, "", packed=True)
    packed = Decoder(spec, kernels, "cpu", torch.float32, max_position=WINDOW, method=Packed(kernels))
    load_weights(dense, files)
    load_weights(packed, files)
    expected: list[Tensor] = []
    got: dict[torch.dtype, list[Tensor]] = {torch.float16: [], torch.int8: []}
    for window in ids.split(WINDOW):
        expected.append(_losses(_logits(dense, window, torch.float32), window))
        for dtype, losses in got.items():
            losses.append(_losses(_logits(packed, window, dtype), window))
    native.set_threads(1)
    reference = torch.cat(expected).mean()
    for dtype, losses in got.items():
        ratio = float((torch.cat(losses).mean() - reference).exp())
        print(f"perplexity {float(reference.exp()):.3f} in float32, {ratio:.5f} of it packed with {dtype} KV")
        assert abs(ratio - 1) < 0.005
