"""Rewrites the table of flags in the README from EngineConfig; --check only says whether it is stale (exit 1)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from engine.cli.flags import flags_table

BEGIN, END = "<!-- flags:begin -->", "<!-- flags:end -->"
README = Path(__file__).resolve().parent.parent / "README.md"


def with_table(text: str) -> str:
    """The README with the current table between the markers. Raises ValueError if they are missing."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the README needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{flags_table()}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the table is stale")
    check = parser.parse_args().check
    text = README.read_text(encoding="utf-8")
    try:
        fresh = with_table(text)
    except ValueError as error:
        print(f"{README.name}: {error}", file=sys.stderr)
        return 2
    if fresh == text:
        print("The table of flags is up to date.")
    elif check:
        print("The table of flags is stale: run `make flags`.", file=sys.stderr)
        return 1
    else:
        README.write_text(fresh, encoding="utf-8")
        print("The table of flags is rewritten.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
