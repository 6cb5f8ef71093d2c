"""The model that is drafted for, as training sees it: hidden states and logits of whole texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from scheduler_proc.models.decoder import Decoder

_PAGE_SIZE = 16


class _States:
    """A follower that keeps what it sees."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.found: list[Tensor] = []

    def expect(self, rows: Tensor, q_starts: Tensor | None, parents: Tensor | None = None) -> None:
        """Rows do not matter."""

    def follow(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, states: list[Tensor]
    ) -> None:
        self.found = states


class Target:
    """A decoder over texts, without a scheduler."""

    def __init__(self, decoder: Decoder, kv_dtype: torch.dtype | None = None) -> None:
        self.decoder = decoder
        self._kv_dtype = kv_dtype or decoder.dtype

    @torch.inference_mode()
    def __call__(self, texts: Sequence[np.ndarray], layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states [num_tokens, len(layers) * hidden] before these layers, and the last ones [num_tokens, hidden],
        of texts (int32 ids each), one after the other."""
        decoder, device = self.decoder, self.decoder.device
        lens = np.array([len(text) for text in texts], np.int32)
        num_pages = -(-lens // _PAGE_SIZE)
        starts = np.cumsum(num_pages) - num_pages
        width = int(num_pages.max())
        table = torch.from_numpy((starts[:, None] + np.arange(width)) % int(num_pages.sum())).int().to(device)
        places = np.concatenate(
            [start * _PAGE_SIZE + np.arange(size) for start, size in zip(starts, lens, strict=True)]
        )
        positions = np.concatenate([np.arange(size) for size in lens])
        shape = decoder.kv_shape
        size = (int(num_pages.sum()), 2, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        kv = [torch.zeros(size, dtype=self._kv_dtype, device=device) for _ in range(shape.num_layers)]
        kv_lens = torch.from_numpy(lens.astype(np.int64)).to(device)
        batch = AttentionBatch(lens, kv_lens, int(lens.max()), table, _PAGE_SIZE, host_kv_lens=lens)
        ids, at, where = (
            torch.from_numpy(array.astype(np.int64)).to(device) for array in (np.concatenate(texts), positions, places)
        )
        states = _States(layers)
        before, decoder.follower = decoder.follower, states
        try:
            last = decoder.forward(ids, at, batch, where, kv)
        finally:
            decoder.follower = before
        return torch.cat(states.found, dim=-1), last

    @torch.inference_mode()
    def embed(self, ids: Tensor) -> Tensor:
        """[num_tokens, hidden] of int64 ids."""
        return self.decoder.embed(ids)

    @torch.inference_mode()
    def logits(self, last: Tensor) -> Tensor:
        """[num_tokens, vocab]"""
        return self.decoder.logits(last)

    @torch.inference_mode()
    def output_rows(self) -> Tensor:
        """float32 [vocab, hidden]: the output projection."""
        size = self.decoder.spec.hidden_size
        unit = torch.eye(size, dtype=self.decoder.dtype, device=self.decoder.device)
        return self.decoder.logits(unit).T.float().contiguous()

    def final_norm(self) -> Tensor:
        """float32 [hidden]: the weight of the norm before it."""
        return self.decoder.parameters()["norm.weight"].float()
