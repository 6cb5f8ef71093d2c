"""Replay what `engine-serve --record FILE` wrote: the scheduler must make the same plans again.

    PYTHONPATH=. python tools/replay.py FILE

Exit status 0 if all plans are equal, 1 at the first difference.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from engine.errors import EngineError
from scheduler_proc.replay import replay


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="file written by --record")
    args = parser.parse_args()
    begin = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="replay-") as folder:
            done = replay(args.record, Path(folder))
    except (EngineError, OSError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    print(f"{done.num_turns} turns, {done.num_plans} plans in {time.monotonic() - begin:.1f} s")
    if done.difference is not None:
        print(done.difference)
        return 1
    print("every plan is the recorded one")
    return 0


if __name__ == "__main__":
    sys.exit(main())
