"""Progress: a bar on a terminal, else a line now and then, for work that takes a while at start-up."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_LINE_EVERY_S = 10.0
_MB = 1_000_000


class Progress:
    """Counts towards a total, on stderr. A context manager."""

    def __init__(self, label: str, total: int, *, is_bytes: bool = True) -> None:
        self._label = label
        self._total = total
        self._is_bytes = is_bytes
        self._done = 0
        self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            kind = {"unit": "B", "unit_scale": True} if is_bytes else {}
            self._bar = tqdm(desc=label, total=total, file=sys.stderr, **kind)

    def update(self, num: int) -> None:
        """Add `num` to what is done."""
        self._done += num
        if self._bar is not None:
            self._bar.update(num)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            done, total = (f"{n / _MB:.0f}" if self._is_bytes else str(n) for n in (self._done, self._total))
            say(f"{self._label}: {done} of {total}{' MB' if self._is_bytes else ''}")

    def set(self, done: int) -> None:
        """Set what is done, for a source that is polled."""
        self.update(max(0, done - self._done))

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def say(line: str) -> None:
    """One line on stderr, for a person who waits for a start."""
    print(line, file=sys.stderr, flush=True)
