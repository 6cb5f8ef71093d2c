"""What the EAGLE heads have in common: the interface to the drafter, and the one decoder layer that they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.model_files.types import RopeConfig
from kernels.attention import AttentionBatch, AttentionSpec
from scheduler_proc.layers.linear import Linear, Part
from scheduler_proc.layers.norm import RmsNorm
from scheduler_proc.layers.rotary import cos_sin_cache
from scheduler_proc.layers.target import LoadTarget
from scheduler_proc.models.decoder import Decoder
from scheduler_proc.parallel.group import Alone


@dataclass(frozen=True)
class HeadSpec:
    """Of a head's layer."""

    hidden_size: int
    """Of the head and of its target alike."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig


class Head(Protocol):
    """Drafts from its target's hidden states, by operations alone: a pass of it can be recorded (kernels.cpu.program).

    Features, [num_tokens, hidden] in the target's dtype, are what it takes of the place before a token, and what it
    makes for the place after it."""

    @property
    def spec(self) -> HeadSpec: ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target: before these its hidden states are taken, as Follower.layers says."""
        ...

    @property
    def num_ids(self) -> int:
        """How many tokens it can draft."""
        ...

    @property
    def offsets(self) -> Tensor | None:
        """int64 [num_ids]: what the target's ids differ by from the head's; None: nothing."""
        ...

    def features(self, states: list[Tensor]) -> Tensor:
        """Of the target's hidden states [num_tokens, hidden], one tensor for each of `layers`."""
        ...

    def store(self, embeds: Tensor, features: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> None:
        """Write keys and values of tokens: embeds, features [num_tokens, hidden], the features of who came before;
        positions, locations int64 [num_tokens]; kv: the head's pages."""
        ...

    def next(
        self,
        embeds: Tensor,
        features: Tensor,
        positions: Tensor,
        batch: AttentionBatch,
        locations: Tensor,
        kv: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """What comes after tokens: what `logits` takes [num_tokens, hidden], and features for who comes next."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """[num_tokens, num_ids]"""
        ...


class LayerMaker:
    """Makes the layers of a head or drafter as its target's are: on its device, in its dtype, packed if those are."""

    def __init__(self, target: Decoder, eps: float) -> None:
        """eps: of norms."""
        self.kernels, self.device, self.dtype = target.kernels, target.device, target.dtype
        self._method = target.method
        self._eps = eps

    @property
    def packs(self) -> bool:
        """Linear layers take activation rows (kernels/packed.py)."""
        return self._method.quantises

    def linear(self, name: str, out_dims: Mapping[str, int], in_dim: int, *, bias: bool = False) -> Linear:
        """out_dims: of projections of one input, by published names."""
        parts = [Part(part, out_dim, 1) for part, out_dim in out_dims.items()]
        return Linear(
            name,
            parts,
            in_dim,
            bias=bias,
            split="none",
            method=self._method,
            group=Alone(),
            device=self.device,
            dtype=self.dtype,
        )

    def norm(self, name: str, dim: int, *, before_linear: bool = False) -> RmsNorm:
        """name: as published; before_linear: nobody but a linear layer reads what it gives."""
        quantises = before_linear and self.packs
        return RmsNorm(
            name, dim, self._eps, kernels=self.kernels, device=self.device, dtype=self.dtype, quantises=quantises
        )


class HeadLayer:
    """Attention and MLP, but for the norm before them."""

    def __init__(self, name: str, spec: HeadSpec, in_dim: int, make: LayerMaker, max_position: int) -> None:
        """name: as published; in_dim: of what attention reads."""
        self._name = name
        self._spec = spec
        self._kernels = make.kernels
        hidden, dim, inner = spec.hidden_size, spec.head_dim, spec.intermediate_size
        self._qkv_sizes = [spec.num_heads * dim, spec.num_kv_heads * dim, spec.num_kv_heads * dim]
        self._unused_queries = unused_queries(dim, make)
        names = ("q_proj", "k_proj", "v_proj")
        self.qkv = make.linear("qkv", dict(zip(names, self._qkv_sizes, strict=True)), in_dim)
        self.o = make.linear("o", {"o_proj": hidden}, spec.num_heads * dim)
        self.gate_up = make.linear("gate_up", {"gate_proj": inner, "up_proj": inner}, hidden)
        self.down = make.linear("down", {"down_proj": hidden}, inner)
        self.mlp_norm = make.norm(f"{name}.post_attention_layernorm", hidden, before_linear=True)
        self._cos_sin = cos_sin_cache(spec.rope, dim, max_position, make.device)
        self._attention = AttentionSpec(dim**-0.5)

    def store(self, x: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> None:
        """Write keys and values of x [num_tokens, in_dim]; the rest is as for Head.store."""
        (q_size, *kv_sizes), unused = self._qkv_sizes, self._unused_queries
        parts = self.qkv.outputs_from(x, q_size - unused)
        self._store(parts, [unused, *kv_sizes], positions, locations, kv)

    def queries(self, x: Tensor, positions: Tensor, locations: Tensor, kv: Tensor) -> Tensor:
        """The same, and the queries of x."""
        return self._store(self.qkv(x), self._qkv_sizes, positions, locations, kv)

    def rest(self, queries: Tensor, residual: Tensor, batch: AttentionBatch, kv: Tensor) -> tuple[Tensor, Tensor]:
        """What the MLP gives, and what that is to be added to; residual may not be read afterwards."""
        out = self._kernels.paged_attention(queries, kv, batch, self._attention)
        x, residual = self.mlp_norm.add(self.o(out.flatten(1)), residual)
        return self.down(self.gate_up.gated(x)), residual

    def _store(self, parts: Tensor, sizes: list[int], positions: Tensor, locations: Tensor, kv: Tensor) -> Tensor:
        dim = self._spec.head_dim
        q, k, v = (part.unflatten(-1, (part.shape[-1] // dim, dim)) for part in parts.split(sizes, dim=-1))
        self._kernels.rope_store(q, k, v, positions, self._cos_sin, kv, locations, None, None, self._spec.norm_eps)
        return q

    def targets(self) -> dict[str, LoadTarget]:
        """What to load, by published names."""
        attention, mlp = f"{self._name}.self_attn", f"{self._name}.mlp"
        found = self.qkv.targets(attention) | self.o.targets(attention)
        return found | self.gate_up.targets(mlp) | self.down.targets(mlp) | self.mlp_norm.targets()


def unused_queries(head_dim: int, make: LayerMaker) -> int:
    """Columns of queries that are worked out where only keys and values are wanted: rope_store takes queries too, and
    only the CPU's kernel takes none."""
    return 0 if make.packs else head_dim
