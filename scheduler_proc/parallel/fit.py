"""Whether a configuration can go with a --tp-size above 1; engine/sharing.py says whether a model can."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError


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
