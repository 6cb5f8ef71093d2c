"""encode_chat: chat messages -> token ids, with markers that users typed kept as plain characters."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.chat_template import ChatTemplate

_MAX_DEPTH = 64


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Mapping[str, object]],
    /,
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, object]] | None = None,
    check: Callable[[str], None] = lambda text: None,
    variables: Mapping[str, object] | None = None,
) -> list[int]:
    """Token ids of a chat prompt: the template's markers become special tokens, those typed in messages do not.

    The template writes the BOS where the model wants one, so no special tokens are added. `variables` are further ones
    of the template; `check` sees the rendered text before it is encoded. Raises InvalidRequestError, and what `check`
    raises.
    """
    shield = _Shield(tokenizer)
    safe_messages = [shield.mapping(message) for message in messages]
    safe_tools = None if tools is None else [shield.mapping(tool) for tool in tools]
    further = {name: shield.value(value) for name, value in (variables or {}).items()}
    further.pop("tools", None)
    generate = bool(further.pop("add_generation_prompt", add_generation_prompt))
    text = template.render(safe_messages, add_generation_prompt=generate, tools=safe_tools, **further)
    check(text)
    if not shield.markers:
        return tokenizer.encode(text, add_special_tokens=False)
    return tokenizer.encode_mixed((piece, not is_typed) for piece, is_typed in shield.split(text))


@dataclass(slots=True)
class _Shield:
    """Swaps markers in a request's strings for placeholders before rendering, and finds these again afterwards.

    A placeholder is a run of digits with a secret part: trimming, case filters and JSON escapes leave it whole.
    """

    tokenizer: Tokenizer
    key: str = field(default_factory=lambda: str(10**31 + secrets.randbelow(9 * 10**31)))
    markers: list[str] = field(default_factory=list)

    def mapping(self, value: Mapping[str, object], depth: int = 0) -> dict[str, object]:
        return {str(self.text(key)): self.value(item, depth + 1) for key, item in value.items()}

    def value(self, value: object, depth: int = 0, *, joined: bool = False) -> object:
        """A copy with every marker replaced. joined: the string may be joined to a neighbour by the template."""
        if depth > _MAX_DEPTH:
            raise InvalidRequestError(f"messages are nested deeper than {_MAX_DEPTH} levels", param="messages")
        if isinstance(value, str):
            return self.text(value, joined)
        if isinstance(value, Mapping):
            return {
                self.text(key) if isinstance(key, str) else key: self.value(item, depth + 1, joined=joined)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.value(item, depth + 1, joined=True) for item in value]
        return value

    def text(self, text: str, joined: bool = False) -> str:
        pattern = self.tokenizer.special_pattern
        if pattern is None:
            return text
        shielded = pattern.sub(lambda match: self.placeholder(match[0]), text)
        if joined and (start := self.marker_start(shielded)):
            shielded = shielded[: -len(start)] + self.placeholder(start)
        return shielded

    def marker_start(self, text: str) -> str:
        """The longest end of `text` that begins a marker, which the next part of a message could complete."""
        longest = max(map(len, self.tokenizer.special_texts))
        for length in range(min(longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(marker.startswith(end) for marker in self.tokenizer.special_texts):
                return end
        return ""

    def placeholder(self, marker: str) -> str:
        self.markers.append(marker)
        return f"{self.key}{len(self.markers) - 1:08d}"

    def split(self, text: str) -> list[tuple[str, bool]]:
        """(piece, whether it is a typed marker) in order."""
        pieces: list[tuple[str, bool]] = []
        for index, piece in enumerate(re.split(f"{self.key}([0-9]{{8}})", text)):
            if index % 2:
                pieces.append((self.markers[int(piece)], True))
            else:
                pieces.append((piece, False))
        return pieces
