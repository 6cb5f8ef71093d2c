"""The chunks of one stream, as framed SSE events. What is constant over a stream is encoded once."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from engine.server.openai.answers import FinishReason, Usage
from engine.server.openai.logprobs import ChatLogprobs, TextLogprobs
from engine.server.sse import event

_encode = msgspec.json.encode


class ChunkFormat(NamedTuple):
    """What differs between the routes."""

    object: bytes
    before_text: bytes
    after_text: bytes
    nothing: bytes
    """In place of the text where a choice ends."""
    first: bytes | None
    """In place of the text where a choice begins; None: it begins with its text."""


CHAT_CHUNK = ChunkFormat(
    b'"chat.completion.chunk"',
    b'"delta":{"content":',
    b"}",
    b'"delta":{}',
    b'"delta":{"role":"assistant","content":""}',
)
TEXT_CHUNK = ChunkFormat(b'"text_completion"', b'"text":', b"", b'"text":""', None)


class ChunkEncoder:
    """Encodes chunks of one id. `with_null_usage`: chunks that carry no counts say usage null, as OpenAI's do."""

    def __init__(self, answer_id: str, created: int, model: str, form: ChunkFormat, *, with_null_usage: bool) -> None:
        self.form = form
        self.head = (
            b'{"id":' + _encode(answer_id) + b',"object":' + form.object + b',"created":' + _encode(created)
            + b',"model":' + _encode(model) + b',"system_fingerprint":null,"choices":['
        )  # fmt: skip
        self._no_usage = b',"usage":null' if with_null_usage else b""

    def choice(self, index: int) -> ChoiceEncoder:
        """The encoder of one choice's chunks."""
        return ChoiceEncoder(self, index)

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: counts and no choices."""
        return event(self.head + b"]" + self.counts(usage) + b"}")

    def counts(self, usage: Usage | None) -> bytes:
        """The usage member of a chunk."""
        return self._no_usage if usage is None else b',"usage":' + _encode(usage)


class ChoiceEncoder:
    """Encodes the chunks of one choice."""

    def __init__(self, chunks: ChunkEncoder, index: int) -> None:
        form = chunks.form
        self._form = form
        self._counts = chunks.counts
        self._head = chunks.head + b'{"index":' + _encode(index) + b","
        self._text_head = event(self._head + form.before_text)[:-2]
        self._before_logprobs = form.after_text + b',"logprobs":'
        self._after_logprobs = b',"finish_reason":null}]'
        self._text_tail = self._before_logprobs + b"null" + self._after_logprobs

    def first(self, usage: Usage | None) -> bytes:
        """The chunk before all text, if the format has one."""
        if self._form.first is None:
            return b""
        choice = self._form.first + b',"logprobs":null,"finish_reason":null}'
        return event(self._head + choice + b"]" + self._counts(usage) + b"}")

    def text(self, text: str, logprobs: ChatLogprobs | TextLogprobs | None, usage: Usage | None) -> bytes:
        """New text, and the logprobs of new tokens."""
        if logprobs is None:
            return self._text_head + _encode(text) + self._text_tail + self._counts(usage) + b"}\n\n"
        scores = self._before_logprobs + _encode(logprobs) + self._after_logprobs
        return self._text_head + _encode(text) + scores + self._counts(usage) + b"}\n\n"

    def finish(self, reason: FinishReason, matched: str | int | None, usage: Usage | None) -> bytes:
        """The chunk that says why the choice ended."""
        stop = _encode(matched)
        choice = (
            self._form.nothing + b',"logprobs":null,"finish_reason":' + _encode(reason)
            + b',"matched_stop":' + stop + b',"stop_reason":' + stop + b"}"
        )  # fmt: skip
        return event(self._head + choice + b"]" + self._counts(usage) + b"}")
