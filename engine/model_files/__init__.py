"""Find a model's files and read its config, before any weight is read. `resolve.resolve` is the way in (no torch)."""

from __future__ import annotations

from engine.model_files.types import ModelConfig, ModelFiles, RopeConfig

__all__ = ["ModelConfig", "ModelFiles", "RopeConfig"]
