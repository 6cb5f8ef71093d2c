"""DecoderSpec, what a decoder computes, and Family, what a line of checkpoints calls it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.errors import ModelFileError
from engine.model_files.types import ModelConfig, RopeConfig


@dataclass(frozen=True)
class DecoderSpec:
    """A pre-norm decoder with rotary grouped-query attention and a gated SiLU MLP, as plain facts."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    """Positions the rotary table covers, in tokens."""
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    """The output projection is the embedding table."""
    windows: tuple[int | None, ...]
    """Per layer: the sliding window in tokens, or None for full attention."""
    qk_norm: bool = False
    """RMS norm of every query and key head before rotary."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False


# Own parameter name -> checkpoint name; {i} is the layer.
HF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "model.embed_tokens",
        "norm": "model.norm",
        "lm_head": "lm_head",
        "layers.{i}.attn_norm": "model.layers.{i}.input_layernorm",
        "layers.{i}.attn.q": "model.layers.{i}.self_attn.q_proj",
        "layers.{i}.attn.k": "model.layers.{i}.self_attn.k_proj",
        "layers.{i}.attn.v": "model.layers.{i}.self_attn.v_proj",
        "layers.{i}.attn.o": "model.layers.{i}.self_attn.o_proj",
        "layers.{i}.attn.q_norm": "model.layers.{i}.self_attn.q_norm",
        "layers.{i}.attn.k_norm": "model.layers.{i}.self_attn.k_norm",
        "layers.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
        "layers.{i}.mlp.gate": "model.layers.{i}.mlp.gate_proj",
        "layers.{i}.mlp.up": "model.layers.{i}.mlp.up_proj",
        "layers.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
    }
)
GGUF_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "token_embd",
        "norm": "output_norm",
        "lm_head": "output",
        "layers.{i}.attn_norm": "blk.{i}.attn_norm",
        "layers.{i}.attn.q": "blk.{i}.attn_q",
        "layers.{i}.attn.k": "blk.{i}.attn_k",
        "layers.{i}.attn.v": "blk.{i}.attn_v",
        "layers.{i}.attn.o": "blk.{i}.attn_output",
        "layers.{i}.attn.q_norm": "blk.{i}.attn_q_norm",
        "layers.{i}.attn.k_norm": "blk.{i}.attn_k_norm",
        "layers.{i}.mlp_norm": "blk.{i}.ffn_norm",
        "layers.{i}.mlp.gate": "blk.{i}.ffn_gate",
        "layers.{i}.mlp.up": "blk.{i}.ffn_up",
        "layers.{i}.mlp.down": "blk.{i}.ffn_down",
    }
)
# What Qwen2 and Qwen3 configs mean when they leave max_window_layers out.
_DEFAULT_MAX_WINDOW_LAYERS = 28
# Tensors that hold nothing the config does not say, whatever the family.
IGNORED_NAMES = (r".*rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"rope_freqs\.weight")


@dataclass(frozen=True)
class Family:
    """A line of checkpoints: how to read its config and what it calls its tensors."""

    architectures: tuple[str, ...]
    """Class names in config.json's `architectures`."""
    spec: Callable[[ModelConfig], DecoderSpec]
    hf_names: Mapping[str, str] = field(default_factory=lambda: HF_NAMES)
    gguf_names: Mapping[str, str] = field(default_factory=lambda: GGUF_NAMES)
    gguf_permuted_qk: bool = False
    """GGUF files hold the rows of q and k in interleaved rotary order."""
    ignored: tuple[str, ...] = IGNORED_NAMES
    """Patterns of checkpoint names that need not be loaded."""

    def checkpoint_name(self, own_name: str, names: Mapping[str, str]) -> str:
        """What a checkpoint calls the parameter `own_name`, such as `layers.3.attn.q.bias`."""
        stem, _, kind = own_name.rpartition(".")
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", stem)
        if layer is None:
            return f"{names[stem]}.{kind}"
        return f"{names[f'layers.{{i}}.{layer[2]}'].replace('{i}', layer[1])}.{kind}"

    def is_ignored(self, checkpoint_name: str) -> bool:
        """Whether a checkpoint tensor may be left out silently."""
        return any(re.fullmatch(pattern, checkpoint_name) for pattern in self.ignored)


def base_spec(
    config: ModelConfig,
    windows: tuple[int | None, ...],
    *,
    qk_norm: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
) -> DecoderSpec:
    """The spec of `config` with a family's own features. Raises ModelFileError for what no family here computes."""
    if config.hidden_act not in ("silu", "swish"):
        raise ModelFileError(f"{config.architecture}: hidden_act {config.hidden_act!r} is not supported, only silu")
    if config.num_heads % config.num_kv_heads:
        raise ModelFileError(
            f"{config.architecture}: {config.num_heads} heads cannot share {config.num_kv_heads} key/value heads"
        )
    if len(windows) != config.num_layers:
        raise ModelFileError(
            f"{config.architecture}: layer_types names {len(windows)} layers, the model has {config.num_layers}"
        )
    return DecoderSpec(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position=config.max_position,
        norm_eps=config.norm_eps,
        rope=config.rope,
        tie_embeddings=config.tie_embeddings,
        windows=windows,
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
    )


def windows_by_layer_type(config: ModelConfig) -> tuple[int | None, ...]:
    """Windows as the Qwen line declares them: layer_types, else a window from layer max_window_layers on."""
    if config.layer_types:
        for kind in config.layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                raise ModelFileError(f"{config.architecture}: layer type {kind!r} is not supported")
        sliding = [kind == "sliding_attention" for kind in config.layer_types]
    else:
        first = _DEFAULT_MAX_WINDOW_LAYERS if config.max_window_layers is None else config.max_window_layers
        sliding = [i >= first for i in range(config.num_layers)]
    return tuple(config.sliding_window if slides else None for slides in sliding)
