"""What a trace of decode steps (tools/bench_decode.py --trace) says of the device's idle time; and a picture of it.

PYTHONPATH=. python tools/trace_step.py steps.json.gz [--timeline steps.svg --title "8B, batch 1"]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.decode_bench.timeline import timeline
from tools.decode_bench.trace import describe, gaps_of, read_trace


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a Chrome trace, .json or .json.gz")
    parser.add_argument("--timeline", type=Path, help="draw two steps as SVG")
    parser.add_argument("--title", help="of the picture; default: the trace's name")
    options = parser.parse_args(arguments)
    trace = read_trace(options.trace)
    gaps = gaps_of(trace)
    if gaps is None:
        raise SystemExit(f"{options.trace} holds no two launches whose kernels are known")
    print(describe(gaps))
    if options.timeline:
        options.timeline.write_text(timeline(trace, options.title or options.trace.name))


if __name__ == "__main__":
    main()
