"""Reads the server-sent events of a streamed answer as bytes; JSON is parsed only where it counts tokens or fails."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from engine.bench.job import Endpoint

# A quote inside a JSON string is escaped, so these match members and never generated text.
_NEW_TEXT = re.compile(rb'"(?:text|content|reasoning_content|reasoning|arguments)"\s*:\s*"(?!")')
_WHOLE_TEXT = re.compile(rb'"text"\s*:\s*"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_ERROR = re.compile(rb'"error"\s*:\s*["{]')


class Counts(NamedTuple):
    """Tokens of a request by the server's count."""

    prompt: int
    output: int
    cached: int


class AnswerReader:
    """One streamed answer. `feed` takes what the connection brings, however it is cut."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.done = False
        """[DONE] has come."""
        self.num_chunks = 0
        """Chunks that brought text."""
        self.error: str | None = None
        """The message of an error event."""
        self._cumulative = endpoint == "generate"
        self._rest = b""
        self._text = b""
        self._telling = b""
        """The last event that holds counts."""

    def feed(self, data: bytes) -> bool:
        """Whether this brought text."""
        data = self._rest + data
        if b"\r" in data:
            # JSON escapes carriage returns, so these are line ends; half of one waits for the other half.
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        before = self.num_chunks
        for event in events:
            self._take(event)
        return self.num_chunks > before

    def counts(self) -> Counts | None:
        """None if the server never said them. Raises ValueError for JSON that holds none."""
        if not self._telling:
            return None
        chunk = json.loads(self._telling[len(b"data:") :])
        try:
            if self._cumulative:
                meta = chunk["meta_info"]
                return _counts(meta, meta.get("cached_tokens"))
            usage = chunk["usage"]
            return _counts(usage, (usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its counts of tokens are wrong: {type(error).__name__}: {error}") from error

    def _take(self, event: bytes) -> None:
        if not event.startswith(b"data:") or b"\n" in event:
            event = self._unfold(event)
        if not event:
            return
        if event.endswith(b"[DONE]") and event[5:].strip() == b"[DONE]":
            self.done = True
            return
        if b'"error"' in event and _ERROR.search(event):
            self.error = _message(event)
        elif self._cumulative:
            self._take_cumulative(event)
        else:
            if b'"usage"' in event and _USAGE.search(event):
                self._telling = event
            if _NEW_TEXT.search(event):
                self.num_chunks += 1

    def _take_cumulative(self, event: bytes) -> None:
        if b'"meta_info"' in event:
            self._telling = event
            if b'"abort"' in event:
                self.error = self.error or _abort_message(event)
        found = _WHOLE_TEXT.search(event)
        if found and found[1] and found[1] != self._text:
            self._text = found[1]
            self.num_chunks += 1

    def _unfold(self, event: bytes) -> bytes:
        """Comments and other fields away, data lines into one; an event named `error` becomes the error."""
        lines = event.split(b"\n")
        data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
        if any(line.startswith(b"event:") and line[6:].strip() == b"error" for line in lines):
            self.error = _message(b"data:" + data)
            return b""
        return b"data:" + data if data else b""


def _counts(told: dict[str, Any], cached: int | None) -> Counts:
    return Counts(int(told["prompt_tokens"]), int(told["completion_tokens"]), int(cached or 0))


def _message(event: bytes) -> str:
    text = event[5:].decode(errors="replace").strip()
    try:
        found: Any = json.loads(text)
    except ValueError:
        return text
    for name in ("error", "message"):
        if isinstance(found, dict):
            found = found.get(name, found)
    return found if isinstance(found, str) else json.dumps(found)


def _abort_message(event: bytes) -> str | None:
    """Why a /generate answer was aborted; None if the word only stands somewhere in it."""
    try:
        reason = json.loads(event[5:])["meta_info"]["finish_reason"]
        return str(reason.get("message") or "aborted") if reason["type"] == "abort" else None
    except (ValueError, KeyError, TypeError):
        return None
