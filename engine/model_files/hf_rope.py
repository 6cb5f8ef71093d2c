"""The rotary part of config.json (rope_theta + rope_scaling, or rope_parameters) -> RopeConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from engine.model_files.json_file import JsonFile
from engine.model_files.types import RopeConfig, RopeKind

SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn")


def rope_config(config: JsonFile, max_position: int) -> RopeConfig:
    """The RopeConfig of a decoder config. Raises ModelFileError for unknown kinds and missing parameters."""
    rope = _parameters(config)
    kind = rope.string("rope_type", "type", default="default")
    if kind not in SUPPORTED:
        raise config.error("rope_type", f"one of {', '.join(SUPPORTED)}", kind)
    for source in (config, rope):
        fraction = source.number("partial_rotary_factor", default=1.0)
        if fraction != 1.0:
            raise config.error("partial_rotary_factor", "1.0 (partial rotation is not supported)", fraction)
    theta = rope.number("rope_theta", default=config.number("rope_theta", default=10_000.0))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=_factor(rope))

    # The top-level key wins over the one inside, as in the reference implementation; both may be missing.
    original = config.natural("original_max_position_embeddings", default=0) or rope.positive(
        "original_max_position_embeddings", default=max_position
    )
    if kind == "dynamic":
        return RopeConfig(theta=theta, kind="dynamic", factor=_factor(rope), original_max_position=max_position)
    if kind == "llama3":
        low = rope.number("low_freq_factor")
        high = rope.number("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"above low_freq_factor {low}", high)
        return RopeConfig(
            theta=theta,
            kind="llama3",
            factor=_factor(rope),
            original_max_position=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    return RopeConfig(
        theta=theta,
        kind=cast(RopeKind, kind),
        factor=_factor(rope, default=max_position / original),
        original_max_position=original,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        attention_factor=_optional(rope, "attention_factor"),
        mscale=_optional(rope, "mscale"),
        mscale_all_dim=_optional(rope, "mscale_all_dim"),
        truncate=rope.boolean("truncate", default=True),
    )


def _parameters(config: JsonFile) -> JsonFile:
    key = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    rope = config.section(key)
    nested = [value for value in rope.data.values() if isinstance(value, Mapping)]
    if not nested:
        return rope
    if any(value != nested[0] for value in nested):
        raise config.error(key, "the same for every layer type", rope.data)
    return JsonFile(config.path, nested[0])


def _factor(rope: JsonFile, default: float | None = None) -> float:
    factor = rope.number("factor", default=default)
    if factor < 1.0:
        raise rope.error("factor", "at least 1", factor)
    return factor


def _optional(rope: JsonFile, key: str) -> float | None:
    return rope.number(key) if rope.get(key) is not None else None
