"""Whether a configuration and a model can be shared by --tp-size processes."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError
from scheduler_proc.models.spec import DecoderSpec

_MOST_RANKS = 64


def check_options(config: EngineConfig) -> None:
    """Raises ConfigError for options that a --tp-size above 1 cannot go with. The device must be settled."""
    size, device = config.process.tp_size, config.device
    if device in ("null", "delayed"):
        raise ConfigError(f"--tp-size {size} shares a model over devices; --device {device} is none. Leave one out.")
    if config.scheduler.deterministic and size > 2:
        # Of two numbers there is but one sum; in which order more are added up depends on how many rows there are.
        raise ConfigError(f"--deterministic goes with --tp-size 1 and 2, not with {size}. Leave one out.")
    if device == "cuda":
        import torch

        count = torch.cuda.device_count()
        if size > count:
            raise ConfigError(
                f"--tp-size {size} needs as many CUDA devices, {count} can be seen; allowed: 1 to {count}."
            )


def check_model(spec: DecoderSpec, size: int) -> None:
    """Raises ConfigError, with the sizes that are possible, for a decoder that cannot be cut into `size` shares."""
    if _fits(spec, size):
        return
    allowed = ", ".join(str(other) for other in range(1, _MOST_RANKS + 1) if _fits(spec, other))
    raise ConfigError(
        f"--tp-size {size} cannot share {spec.num_heads} heads, {spec.num_kv_heads} key/value heads and an MLP of "
        f"{spec.intermediate_size}; allowed for this model: {allowed}."
    )


def _fits(spec: DecoderSpec, size: int) -> bool:
    shares_kv = spec.num_kv_heads % size == 0 or size % spec.num_kv_heads == 0
    return spec.num_heads % size == 0 and shares_kv and spec.intermediate_size % size == 0
