"""What is known of a model before any weight is read: ModelConfig and ModelFiles (no torch)."""

from __future__ import annotations

from typing import Literal

import msgspec

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "factors"]


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding. `kind` says which of the other fields act; lengths are in tokens."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Context the unscaled model was trained for (llama3, yarn); 0 where it does not apply."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the correction range to whole dimensions."""
    factors: tuple[float, ...] = ()
    """kind `factors`: divisor of each of the rotary_dim / 2 frequencies (GGUF's rope_freqs.weight)."""


class ModelConfig(msgspec.Struct, frozen=True):
    """The shape of a decoder, from config.json or a GGUF header. Counts are per layer where it matters."""

    architecture: str
    """The checkpoint's class name, for example LlamaForCausalLM."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool | None = None
    """config.json's attention_bias; None where the file does not say and the family decides."""
    mlp_bias: bool = False
    sliding_window: int | None = None
    """Window in tokens of the layers that have one; None = no window anywhere."""
    layer_types: tuple[str, ...] = ()
    """Per layer `full_attention` or `sliding_attention`; () where the file does not say and the family decides."""
    max_window_layers: int | None = None
    hidden_act: str = "silu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    """End-of-sequence ids: config, generation_config and tokenizer together."""
    dtype: str = "float32"
    """The checkpoint's dtype: float32, float16 or bfloat16 (GGUF: float32)."""


class ModelFiles(msgspec.Struct, frozen=True):
    """A resolved model: where everything lies, and its config. Travels to every process."""

    name: str
    """How the user named it; the default served name derives from it."""
    format: Literal["safetensors", "gguf", "dummy"]
    config: ModelConfig
    path: str
    """The directory (HF layout) or the .gguf file."""
    weight_files: tuple[str, ...]
    """Absolute paths, in loading order; () for dummy."""
    tokenizer_path: str
    """A directory (HF layout), a .gguf file, a tokenizer.json or a tokenizer.model."""
    tokenizer_vocab_size: int | None = None
    """Set when the tokenizer is cut or padded to this size (dummy without tokenizer files)."""
