"""Kinds of values that the benchmarks' options have."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A number, 1 at least. Raises ValueError or ArgumentTypeError."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)
