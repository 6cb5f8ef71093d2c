"""The kind of thing that a prompt asks for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A kind of request. `phrasings` are templates (scene.py); `limits` names the extra wishes that suit (style.py)."""

    name: str
    limits: str
    phrasings: tuple[str, ...]
    held: bool = False  # left out of training
