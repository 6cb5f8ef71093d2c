"""The table of model families."""

from __future__ import annotations

from engine.errors import ModelFileError
from engine.model_files.types import ModelConfig
from scheduler_proc.models import llama, mistral, qwen2, qwen3
from scheduler_proc.models.spec import DecoderSpec, Family

# A new family is one module and one entry here.
FAMILIES: tuple[Family, ...] = (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY)


def family_of(architecture: str) -> Family:
    """The family that reads checkpoints of class `architecture`. Raises ModelFileError with the list of known ones."""
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.architectures))
    raise ModelFileError(f"architecture {architecture!r} is not supported; supported: {known}")


def spec_of(config: ModelConfig) -> DecoderSpec:
    """The decoder that `config` describes. Raises ModelFileError if no family computes it."""
    return family_of(config.architecture).spec(config)
