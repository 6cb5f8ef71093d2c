"""Cases of which only some are quick."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def quick_first(every: Iterable[tuple[Any, ...]], quick: Collection[int]) -> list[Any]:
    """All cases; those whose numbers are not `quick` are slow."""
    return [case if n in quick else pytest.param(*case, marks=pytest.mark.slow) for n, case in enumerate(every)]
