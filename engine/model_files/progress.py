"""Progress: a bar on a terminal, else a line now and then, for work that takes a while at start-up."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_LINE_EVERY_S = 10.0
_MB = 1_000_000


class Progress:
    """Counts bytes towards a total, on stderr. A context manager."""

    def __init__(self, label: str, total_bytes: int) -> None:
        self._label = label
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._last_line = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(desc=label, total=total_bytes, unit="B", unit_scale=True, file=sys.stderr)

    def update(self, num_bytes: int) -> None:
        """Add `num_bytes` to what is done."""
        self._done_bytes += num_bytes
        if self._bar is not None:
            self._bar.update(num_bytes)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(f"{self._label}: {self._done_bytes / _MB:.0f} of {self._total_bytes / _MB:.0f} MB")

    def set(self, done_bytes: int) -> None:
        """Set what is done, for a source that is polled."""
        self.update(max(0, done_bytes - self._done_bytes))

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
