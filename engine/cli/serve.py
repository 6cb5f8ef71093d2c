"""`engine-serve`: parse the options, start the processes, serve HTTP until told to stop."""

from __future__ import annotations

import os
import signal
import sys

from engine.cli.flags import KEY_VARIABLE, parse
from engine.errors import EngineError


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the process's exit status."""
    # Until the server has its own handlers: a stop amid the imports is a stop, not an error.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: sys.exit(0))
    try:
        arguments = sys.argv[1:] if argv is None else argv
        config = parse(arguments)
        hide_key(arguments)
        os.environ.pop(KEY_VARIABLE, None)  # the processes that are started need it not
        # Everything heavier than the options is imported after them, so that --help and a typo answer at once.
        from engine.cli.run import run

        return run(config)
    except EngineError as error:
        print(f"engine-serve: error: {error}", file=sys.stderr)
        return error.exit_code


def hide_key(arguments: list[str]) -> None:
    """Other users of the machine read command lines: take this one's away once it is read, if a key stands in it."""
    if any(argument.split("=", 1)[0] == "--api-key" for argument in arguments):
        import setproctitle

        setproctitle.setproctitle("engine-serve (options hidden: --api-key)")


if __name__ == "__main__":
    sys.exit(main())
