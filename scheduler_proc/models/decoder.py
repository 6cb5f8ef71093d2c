"""The one decoder that every dense family's spec describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention import AttentionBatch
from kernels.dispatch import KernelSet
from scheduler_proc.layers.attention import Attention
from scheduler_proc.layers.linear import LinearMethod, Unquantised
from scheduler_proc.layers.mlp import GatedMlp
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.layers.vocabulary import SplitTable, Table
from scheduler_proc.models.spec import DecoderSpec
from scheduler_proc.parallel.group import Alone, Group
from scheduler_proc.speculative.follower import Follower


@dataclass(frozen=True)
class KvShape:
    """What the pool must know: each of `num_layers` layers stores `[2, num_kv_heads, head_dim]` per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class _Layer:
    attn_norm: RmsNorm
    attn: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp


class Decoder:
    """Weights and forward pass of a decoder, for inference; call it under torch.inference_mode.

    Parameters are allocated here and filled by scheduler_proc.weights. In a group of several processes it holds a share
    of every attention and MLP layer and of the vocabulary; `forward` and `logits` are then called by all ranks alike.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        kernels: KernelSet,
        device: torch.device | str,
        dtype: torch.dtype,
        *,
        max_position: int | None = None,
        method: LinearMethod | None = None,
        group: Group | None = None,
    ) -> None:
        """max_position: positions that will be asked for at most (default: all that the model knows).

        method: how weights are kept (default: dense); group: who shares the model (default: nobody). Raises ValueError
        for a spec that the group cannot share.
        """
        device = torch.device(device)
        method = method or Unquantised(kernels)
        self.group: Group = group or Alone()
        group = self.group
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.kernels = kernels
        self.method = method
        """How its weights are kept."""
        kv_heads = max(1, spec.num_kv_heads // group.size)
        self.kv_shape = KvShape(spec.num_layers, kv_heads, spec.head_dim)
        self._embed = _table("embed", spec, method, group, device, dtype)
        self._lm_head = self._embed if spec.tie_embeddings else _table("lm_head", spec, method, group, device, dtype)
        num_positions = spec.max_position if max_position is None else min(max_position, spec.max_position)
        self._cos_sin = cos_sin_cache(spec.rope, spec.head_dim, num_positions, device)

        def norm(name: str, quantises: bool) -> RmsNorm:
            return RmsNorm(
                name,
                spec.hidden_size,
                spec.norm_eps,
                kernels=kernels,
                device=device,
                dtype=dtype,
                quantises=quantises,
            )

        def layer(i: int) -> _Layer:
            name = f"layers.{i}"
            window = spec.windows[i]
            attn = Attention(
                f"{name}.attn",
                spec,
                window,
                kernels=kernels,
                method=method,
                group=group,
                device=device,
                dtype=dtype,
            )
            mlp = GatedMlp(f"{name}.mlp", spec, kernels=kernels, method=method, group=group, device=device, dtype=dtype)
            return _Layer(
                norm(f"{name}.attn_norm", method.quantises), attn, norm(f"{name}.mlp_norm", method.quantises), mlp
            )

        self._layers = tuple(layer(i) for i in range(spec.num_layers))
        self._norm = norm("norm", False)
        self.widens_logits = False
        """Logits are float32 whatever the model's dtype: else they are only where a row of a step changes its own, and
        what is worked out from them may differ in its last bits."""
        self.follower: Follower | None = None
        """Sees what passes through some layers."""
        self.on_layer: Callable[[], None] = _nothing
        """Called after every layer that ran on the host: a long step is a sign of life, not a hang."""

    def forward(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, kv: list[Tensor]
    ) -> Tensor:
        """Hidden states after the final norm, `[num_tokens, hidden]` in the model's dtype.

        inputs: token ids int64 `[num_tokens]` or embeddings `[num_tokens, hidden]`; positions: int64 `[num_tokens]`,
        what rotary uses; locations: int64 `[num_tokens]`, `page * page_size + offset` where each token's key and value
        go; kv: per layer `[num_pages, 2, page_size, num_kv_heads, head_dim]`.
        """
        x, states = self.states(inputs, positions, batch, locations, kv)
        if self.follower is not None:
            self.follower.follow(inputs, positions, batch, locations, states)
        return x

    def states(
        self, inputs: Tensor, positions: Tensor, batch: AttentionBatch, locations: Tensor, kv: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """`forward` without the follower's part: what it gives, and the hidden states that the follower wants."""
        x = self.embed(inputs)
        residual: Tensor | None = None
        wanted = () if self.follower is None else self.follower.layers
        states: list[Tensor] = []
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv, strict=True)):
            if residual is None:
                x, residual = layer.attn_norm(x), x
            else:
                x, residual = layer.attn_norm.add(x, residual)
            if index in wanted:
                # What comes next adds to it in place.
                states.append(self.kernels.concat([residual]))
            x = layer.attn(x, positions, self._cos_sin, batch, locations, layer_kv)
            x, residual = layer.mlp_norm.add(x, residual)
            x = layer.mlp(x)
            self.on_layer()
        if residual is None:
            x = self._norm(x)
        else:
            x, residual = self._norm.add(x, residual)
        if len(self._layers) in wanted:
            assert residual is not None, "a model without layers has no hidden states"
            states.append(residual)
        if len(self._layers) + 1 in wanted:
            states.append(x)
        return x, states

    def embed(self, inputs: Tensor) -> Tensor:
        """`[num_tokens, hidden]` in the model's dtype, of token ids int64 `[num_tokens]` or embeddings."""
        return inputs.to(self.dtype) if inputs.is_floating_point() else self._embed.lookup(inputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` in the model's dtype, from the hidden states `[rows, hidden]` of tokens that need them."""
        logits = self._lm_head.logits(hidden)
        return logits.float() if self.widens_logits else logits

    def parameters(self) -> dict[str, Tensor]:
        """Every parameter as stored (fused, this process's share) by name; a tied output projection is not repeated."""
        found = self._embed.parameters()
        for layer in self._layers:
            for part in (layer.attn_norm, layer.attn, layer.mlp_norm, layer.mlp):
                found |= part.parameters()
        found |= self._norm.parameters()
        if not self.spec.tie_embeddings:
            found |= self._lm_head.parameters()
        return found

    def targets(self) -> dict[str, LoadTarget]:
        """Every tensor to load, unfused and whole, under the names that a Family maps to a checkpoint's."""
        found = self._embed.targets()
        for layer in self._layers:
            found |= layer.attn_norm.targets() | layer.attn.targets() | layer.mlp_norm.targets() | layer.mlp.targets()
        found |= self._norm.targets()
        if not self.spec.tie_embeddings:
            found |= self._lm_head.targets()
        return found


def _table(
    name: str, spec: DecoderSpec, method: LinearMethod, group: Group, device: torch.device, dtype: torch.dtype
) -> Table:
    """A table with a row for every token, split over the group."""
    if group.size == 1:
        return Table(name, spec.vocab_size, spec.hidden_size, method=method, device=device, dtype=dtype)
    return SplitTable(name, spec.vocab_size, spec.hidden_size, method=method, group=group, device=device, dtype=dtype)


def _nothing() -> None:
    """Nobody wants to hear of layers."""
