"""The kinds of text that passages are composed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Genre:
    """One sentence of `start`, several of `body` in their order there, one of `end`; all templates (scene.py)."""

    start: tuple[str, ...]
    body: tuple[str, ...]
    end: tuple[str, ...]
