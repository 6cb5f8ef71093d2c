"""Runs a decoder through randomly placed, NaN-filled pages, as a scheduler would."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.model_files.hf_config import hf_model_config
from kernels.attention import AttentionBatch
from kernels.dispatch import KernelSet, select
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.models.registry import family_of, spec_of
from scheduler_proc.models.spec import DecoderSpec


def cpu_kernels() -> KernelSet:
    return select("cpu", torch.float32, "")


def spec_in(directory: Path) -> DecoderSpec:
    return spec_of(hf_model_config(directory))


def decoder_from(
    spec: DecoderSpec,
    tensors: Mapping[str, Tensor],
    kernels: KernelSet | None = None,
    max_position: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A decoder filled from checkpoint tensors by name; what the checkpoint lacks is random, what is left is ignored.

    Unlike load_weights it takes a spec that differs from the checkpoint's own, which is what the tests are about.
    """
    decoder = Decoder(spec, kernels or cpu_kernels(), device, dtype, max_position=max_position)
    family = family_of(spec.architecture)
    for own_name, target in decoder.targets().items():
        value = tensors.get(family.checkpoint_name(own_name, family.hf_names))
        target.load(torch.randn(target.shape) * 0.3 if value is None else value)
    return decoder


@dataclass
class Context:
    """One sequence: its pages and how many tokens are in them."""

    pages: Tensor
    length: int = 0


@dataclass
class PagedRunner:
    """Owns NaN-filled pages and hands random ones to contexts."""

    decoder: Decoder
    page_size: int
    num_pages: int
    seed: int = 0
    kv: list[Tensor] = field(init=False)
    free: Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.decoder.kv_shape
        size = (self.num_pages, 2, self.page_size, shape.num_kv_heads, shape.head_dim)
        place, dtype = self.decoder.device, self.decoder.dtype
        self.kv = [torch.full(size, torch.nan, device=place, dtype=dtype) for _ in range(shape.num_layers)]
        self.free = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(self.seed))

    def context(self, max_length: int) -> Context:
        count = -(-max_length // self.page_size)
        pages, self.free = self.free[:count], self.free[count:]
        assert len(pages) == count
        return Context(pages)

    def step(self, rows: list[tuple[Context, Tensor]], embeddings: Tensor | None = None) -> list[Tensor]:
        """Extend each context by its token ids; the logits of every token, per row."""
        width = max(len(context.pages) for context, _ in rows) + 1
        table = torch.randint(0, self.num_pages, (len(rows), width))
        positions, locations = [], []
        for i, (context, ids) in enumerate(rows):
            table[i, : len(context.pages)] = context.pages
            pos = torch.arange(context.length, context.length + len(ids))
            context.length += len(ids)
            positions.append(pos)
            locations.append(table[i, pos // self.page_size] * self.page_size + pos % self.page_size)
        q_lens = [len(ids) for _, ids in rows]
        kv_lens = torch.tensor([context.length for context, _ in rows])
        place, bound = self.decoder.device, int(kv_lens.max()) + 3
        batch = AttentionBatch(
            np.array(q_lens, dtype=np.int32), kv_lens.to(place), bound, table.to(place), self.page_size
        )
        inputs = torch.cat([ids for _, ids in rows]) if embeddings is None else embeddings
        where = torch.cat(locations).to(place)
        with torch.inference_mode():
            hidden = self.decoder.forward(inputs.to(place), torch.cat(positions).to(place), batch, where, self.kv)
            return list(self.decoder.logits(hidden).split(q_lens))


def run_one(
    decoder: Decoder, ids: Tensor, *, page_size: int = 16, chunk: int | None = None, decode_from: int | None = None
) -> Tensor:
    """Logits of every token of one sequence: chunks up to decode_from, then token by token."""
    runner = PagedRunner(decoder, page_size, len(ids) + 4)
    context = runner.context(len(ids))
    prefix = len(ids) if decode_from is None else decode_from
    sizes = [min(chunk or prefix, prefix - start) for start in range(0, prefix, chunk or prefix)]
    sizes += [1] * (len(ids) - prefix)
    return torch.cat([runner.step([(context, part)])[0] for part in ids.split(sizes)])
