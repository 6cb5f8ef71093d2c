"""Tokens to text, one token at a time: whole characters only, and cut before the first stop string.

Bytes are decoded incrementally, so a token costs its own length however long the text is, and the pieces joined are
the whole text. Text that may be the beginning of a stop string is held until the next tokens decide.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one request. `push` tokens, `take` what is ready; after `finish` nothing is held."""

    def __init__(
        self,
        table: Sequence[bytes],
        skipped: frozenset[int],
        stops: tuple[str, ...],
        *,
        min_tokens: int = 0,
        keep_stop: bool = False,
    ) -> None:
        """Stop strings count only in the text after the first `min_tokens` tokens; `keep_stop`: it stays in."""
        self._table = table
        self._skipped = skipped
        self._decode = _decoder("replace").decode
        self._stops = stops
        self._longest = max((len(stop) for stop in stops), default=0)
        self._tokens_without_stop = min_tokens
        self._keep_stop = keep_stop
        self._held = ""
        self._ready: list[str] = []
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, token: int) -> bool:
        """Add one token; True if a stop string ends the text with it."""
        self._tokens_without_stop -= 1
        if token in self._skipped or token >= len(self._table):
            return False
        return self._add(self._decode(self._table[token]))

    def finish(self) -> bool:
        """No more tokens: half a character becomes U+FFFD, held text is let go; True if a stop string matched."""
        if self._add(self._decode(b"", True)):
            return True
        self._ready.append(self._held)
        self._held = ""
        return False

    def take(self) -> str:
        """The text that became certain since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _add(self, text: str) -> bool:
        if not self._stops or self._tokens_without_stop >= 0:
            if text:
                self._ready.append(text)
            return False
        if not text:
            return False
        window = self._held + text
        found = [(index, stop) for stop in self._stops if (index := window.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            self._ready.append(window[: index + len(self.matched) if self._keep_stop else index])
            self._held = ""
            return True
        keep = self._open_length(window)
        self._ready.append(window[: len(window) - keep])
        self._held = window[len(window) - keep :]
        return False

    def _open_length(self, window: str) -> int:
        """Length of the longest end of `window` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            if any(stop.startswith(window[-length:]) for stop in self._stops):
                return length
        return 0
