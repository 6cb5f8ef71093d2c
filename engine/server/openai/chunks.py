"""The chunks of one chat stream, as framed SSE events. What is constant over a stream is encoded once."""

from __future__ import annotations

import msgspec

from engine.server.openai.protocol import FinishReason, Usage
from engine.server.sse import event

_encode = msgspec.json.encode


class ChunkEncoder:
    """Encodes chunks of one id. `with_null_usage`: chunks that carry no counts say usage null, as OpenAI's do."""

    def __init__(self, answer_id: str, created: int, model: str, *, with_null_usage: bool) -> None:
        self._head = (
            b'{"id":' + _encode(answer_id) + b',"object":"chat.completion.chunk","created":' + _encode(created)
            + b',"model":' + _encode(model) + b',"system_fingerprint":null,"choices":['
        )  # fmt: skip
        self._text_head = event(self._head + b'{"index":0,"delta":{"content":')[:-2]
        self._no_usage = b',"usage":null' if with_null_usage else b""
        self._text_tail = b'},"logprobs":null,"finish_reason":null}]'

    def role(self, usage: Usage | None) -> bytes:
        """The first chunk."""
        choice = b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return event(self._head + choice + b"]" + self._usage(usage) + b"}")

    def text(self, text: str, usage: Usage | None) -> bytes:
        """New text."""
        return self._text_head + _encode(text) + self._text_tail + self._usage(usage) + b"}\n\n"

    def finish(self, reason: FinishReason, matched: str | int | None, usage: Usage | None) -> bytes:
        """The chunk that says why the answer ended."""
        stop = _encode(matched)
        choice = (
            b'{"index":0,"delta":{},"logprobs":null,"finish_reason":' + _encode(reason)
            + b',"matched_stop":' + stop + b',"stop_reason":' + stop + b"}"
        )  # fmt: skip
        return event(self._head + choice + b"]" + self._usage(usage) + b"}")

    def usage(self, usage: Usage) -> bytes:
        """The last chunk: counts and no choices."""
        return event(self._head + b"]" + self._usage(usage) + b"}")

    def _usage(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else b',"usage":' + _encode(usage)
