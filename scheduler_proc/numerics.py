"""What a start computes in: whether weights stay packed, and the types of activations and of the KV cache."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.errors import ConfigError, StartupError
from engine.model_files.types import ModelFiles

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

_ADVICE = "They are not built: install a C++ compiler (apt install g++), then run `make setup` or `pip install` again."


@dataclass(frozen=True)
class Numerics:
    """Decided once, at the start."""

    packed: bool
    """Matrices stay packed, and the CPU kernels multiply by them."""
    dtype: torch.dtype
    """Of activations, and of weights that are not packed."""
    kv_dtype: torch.dtype


def refuse_without_a_model(config: EngineConfig) -> None:
    """Raises ConfigError for what would have no effect with the device null."""
    options = config.model
    if options.quantization is not None:
        raise ConfigError(f"--device null has no weights for --quantization {options.quantization}; leave one out.")
    if options.kv_cache_dtype != "auto":
        raise ConfigError(f"--device null has no cache for --kv-cache-dtype {options.kv_cache_dtype}; leave one out.")


def choose_numerics(config: EngineConfig, model: ModelFiles) -> Numerics:
    """Raises ConfigError where options contradict each other, or need the CPU kernels where there are none.

    Raises ModelFileError for a broken GGUF file, StartupError for a library of kernels that cannot be loaded.
    """
    import torch

    options = config.model
    if config.device == "cuda":
        return _cuda_numerics(config, model)
    if options.dtype == "auto":
        packed, dtype = _packed(config, model), torch.float32
    else:
        if asked := _asked_int8(config):
            raise ConfigError(
                f"--dtype {options.dtype} unpacks all weights, but {asked} needs packed ones; leave one out."
            )
        packed, dtype = False, getattr(torch, options.dtype)
    if config.scheduler.deterministic and not packed:
        raise ConfigError(
            "--deterministic on a CPU needs packed weights (a GGUF file, or --quantization int8); in floats the last "
            "bits depend on the batch."
        )
    if options.kv_cache_dtype != "auto":
        return Numerics(packed, dtype, getattr(torch, options.kv_cache_dtype))
    return Numerics(packed, dtype, torch.float16 if packed else dtype)


def _cuda_numerics(config: EngineConfig, model: ModelFiles) -> Numerics:
    import torch

    options = config.model
    if asked := _asked_int8(config):
        raise ConfigError(f"{asked} is for the CPU's kernels; leave it out with --device cuda.")
    dtype = torch.float16 if model.config.dtype == "float16" else torch.bfloat16
    if options.dtype != "auto":
        dtype = getattr(torch, options.dtype)
    return Numerics(False, dtype, dtype if options.kv_cache_dtype == "auto" else getattr(torch, options.kv_cache_dtype))


def _packed(config: EngineConfig, model: ModelFiles) -> bool:
    """With --dtype auto."""
    asked = _asked_int8(config)
    if config.model.quantization != "int8" and not _has_packed_matrices(model):
        if asked:
            raise ConfigError(
                f"{asked} needs packed weights, and those of {model.name} are not; add --quantization int8, or leave "
                "it out."
            )
        return False
    head_dim = model.config.head_dim
    if head_dim % 8 or head_dim > 256:
        if asked:
            raise ConfigError(
                f"{asked} needs heads of 8, 16, ... 256 elements; those of {model.name} have {head_dim}. Leave it out."
            )
        log.warning(
            "event=cpu_kernels_unfit effect=weights of %s are unpacked to float32: heads of %d elements are not a "
            "multiple of 8 up to 256",
            model.name,
            head_dim,
        )
        return False
    if _has_cpu_kernels():
        return True
    if asked:
        raise ConfigError(f"{asked} needs the CPU kernels. {_ADVICE}")
    log.warning(
        "event=cpu_kernels_missing effect=weights of %s are unpacked to float32: larger and slower. %s",
        model.name,
        _ADVICE,
    )
    return False


def _asked_int8(config: EngineConfig) -> str:
    """The flags that only packed weights can serve; empty if there are none."""
    options = config.model
    values = {"--quantization": options.quantization, "--kv-cache-dtype": options.kv_cache_dtype}
    return " with ".join(f"{flag} int8" for flag, value in values.items() if value == "int8")


def _has_packed_matrices(model: ModelFiles) -> bool:
    if model.format != "gguf":
        return False
    from scheduler_proc.weights.gguf_file import has_packed_matrices

    return has_packed_matrices(model.weight_files)


def _has_cpu_kernels() -> bool:
    from kernels.cpu import native

    try:
        return native.library() is not None
    except ValueError as error:
        raise ConfigError(f"ENGINE_CPU_ISA: {error}") from error
    except OSError as error:
        raise StartupError(
            f"the CPU kernels cannot be loaded: {error}. Delete that file and run python -m kernels.cpu.build"
        ) from error
