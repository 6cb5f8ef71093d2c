"""Measures a running server over HTTP: `python tools/bench_serving.py --help`."""

from __future__ import annotations

import sys

from engine.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
