"""Logprobs on the OpenAI wire. A token's text is its bytes as UTF-8, with U+FFFD for what is no whole character."""

from __future__ import annotations

import codecs
from typing import TypeAlias

import msgspec

from engine.ipc.messages import TokenLogprob

LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""
RESYNC = 32
"""Characters within which a prompt's next token is looked for after one that is not in the text."""

_decoder = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class ChatAlternative(msgspec.Struct):
    """A token that could have stood here."""

    token: str
    bytes: list[int]
    logprob: float


class ChatTokenLogprob(msgspec.Struct):
    """A token of the answer."""

    token: str
    bytes: list[int]
    logprob: float | None
    top_logprobs: list[ChatAlternative]


class ChatLogprobs(msgspec.Struct):
    """Of a chat choice, or of a chunk of it."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Of a completion, or of a chunk of it: four lists of one length.

    `text_offset` counts characters (code points) from the beginning of the choice's whole text.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatLogprobWriter:
    """Renders the tokens of one chat choice."""

    def render(self, entries: list[TokenLogprob]) -> ChatLogprobs:
        """The next tokens."""
        return ChatLogprobs([_chat_entry(entry) for entry in entries])


class TextLogprobWriter:
    """Renders the tokens of one completion, in order, and knows where in the text each begins."""

    def __init__(self) -> None:
        self._decoder = _decoder("replace")
        self._offset = 0
        self._prompt = ""
        self._num_prompt_tokens = 0

    def begin(self, prompt: str, num_tokens: int) -> None:
        """The text begins with `prompt`, and the first `num_tokens` tokens are the prompt's."""
        self._prompt = prompt
        self._num_prompt_tokens = num_tokens
        self._offset = 0 if num_tokens else len(prompt)

    def render(self, entries: list[TokenLogprob]) -> TextLogprobs:
        """The next tokens."""
        shown = TextLogprobs([], [], [], [])
        for entry in entries:
            text = _text(entry.bytes)
            shown.tokens.append(text)
            shown.token_logprobs.append(_finite(entry.logprob))
            shown.top_logprobs.append(_by_text(entry, text))
            shown.text_offset.append(self._place(entry.bytes))
        return shown

    def _place(self, data: bytes) -> int:
        """Where the token begins: its first character, also when an earlier token began that."""
        broken, text = self._decode(data)
        if self._num_prompt_tokens == 0:
            start = self._offset + broken
            self._offset = start + len(text)
            return start
        start = self._offset + broken
        # Start tokens, and the blank some tokenizers put first, are no part of the prompt's text.
        at = self._prompt.find(text, start, start + len(text) + RESYNC) if text else -1
        if at >= 0:
            start, self._offset = at, at + len(text)
        else:
            self._offset = start
        self._num_prompt_tokens -= 1
        if self._num_prompt_tokens == 0:
            self._offset = len(self._prompt)
            self._decoder.reset()
        return start

    def _decode(self, data: bytes) -> tuple[int, str]:
        """(1 if these bytes show that a character before them stays broken, the text that became whole)."""
        pending = self._decoder.getstate()[0]
        if not pending:
            return 0, self._decoder.decode(data)
        text = self._decoder.decode(data[:1])
        broken = text.startswith(_REPLACEMENT) and pending + data[:1] != b"\xef\xbf\xbd"
        text += self._decoder.decode(data[1:])
        return (1, text[1:]) if broken else (0, text)


LogprobWriter: TypeAlias = ChatLogprobWriter | TextLogprobWriter


def _chat_entry(entry: TokenLogprob) -> ChatTokenLogprob:
    tops = [ChatAlternative(_text(data), list(data), max(value, LEAST)) for _, value, data in entry.top]
    return ChatTokenLogprob(_text(entry.bytes), list(entry.bytes), _finite(entry.logprob), tops)


def _by_text(entry: TokenLogprob, text: str) -> dict[str, float] | None:
    """Logprob by text, the token itself included; of tokens that read the same, the most likely one's."""
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for _, value, data in entry.top:
        found.setdefault(_text(data), max(value, LEAST))
    found.setdefault(text, max(entry.logprob, LEAST))
    return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
