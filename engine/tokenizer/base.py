"""Tokenizer: the one interface of every tokenizer, whatever file it came from."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a builder found beside the vocabulary. Ids that the file does not name are None or absent."""

    special_ids: frozenset[int]
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    """add_special_tokens puts bos_id in front."""
    adds_eos: bool = False
    """add_special_tokens puts eos_ids[0] at the end."""
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, unk_token, pad_token -> their text, as chat templates name them."""


class Tokenizer(ABC):
    """Text <-> token ids. Safe to call from several threads.

    token_bytes and token_table give the exact bytes an id adds to the text, so that a stream of ids becomes text
    by concatenating bytes and decoding UTF-8 incrementally.
    """

    strips_leading_space = False
    """The first token's leading space is an artefact of encoding and no part of the text (sentencepiece)."""

    def __init__(self, facts: TokenizerFacts) -> None:
        self.special_ids = facts.special_ids
        self.bos_id = facts.bos_id
        self.eos_ids = facts.eos_ids
        self.chat_template = facts.chat_template
        self.special_tokens = dict(facts.special_tokens)
        self._prefix = [facts.bos_id] if facts.adds_bos and facts.bos_id is not None else []
        self._suffix = [facts.eos_ids[0]] if facts.adds_eos and facts.eos_ids else []

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids: the highest id + 1."""

    @abstractmethod
    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[list[int]]:
        """Token ids of each text, computed in parallel.

        add_special_tokens: add what the model's files ask for (a BOS, say).
        parse_special: False reads control markers such as `<|im_end|>` in the text as plain characters.
        """

    def encode(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        """Token ids of one text; the arguments are those of encode_batch."""
        return self.encode_batch([text], add_special_tokens=add_special_tokens, parse_special=parse_special)[0]

    @abstractmethod
    def _build_token_table(self) -> list[bytes]:
        """The bytes of every id, [vocab_size]."""

    @cached_property
    def _table(self) -> list[bytes]:
        return self._build_token_table()

    def token_table(self) -> list[bytes]:
        """The bytes each id adds to the text, [vocab_size]; b"" for ids without a token. Built once, do not change."""
        return self._table

    def token_bytes(self, id: int) -> bytes:
        """The bytes an id adds to the text; b"" for an id beyond the vocabulary."""
        table = self._table
        return table[id] if 0 <= id < len(table) else b""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of a sequence; bytes that are no UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id) for id in ids if id not in skipped)
        if self.strips_leading_space:
            data = data.removeprefix(b" ")
        return data.decode(errors="replace")

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens, longest first: what parse_special=True finds in a text."""
        texts = {self.token_bytes(id).decode(errors="replace") for id in self.special_ids}
        return tuple(sorted(texts - {""}, key=lambda text: (-len(text), text)))

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches any special token's text, the longest first; None where there is no special token."""
        return re.compile("|".join(map(re.escape, self.special_texts))) if self.special_texts else None

    @cached_property
    def _special_id_of(self) -> dict[str, int]:
        return {self.token_bytes(id).decode(errors="replace"): id for id in sorted(self.special_ids, reverse=True)}

    def encode_mixed(self, parts: Iterable[tuple[str, bool]]) -> list[int]:
        """Token ids of one text given in parts (text, parse_special), without added special tokens.

        Text between two special tokens is encoded as a whole even where it spans several parts.
        """
        pattern = self.special_pattern
        ids: list[int] = []
        plain: list[str] = []

        def flush() -> None:
            text = "".join(plain)
            plain.clear()
            if text:
                ids.extend(self.encode(text, add_special_tokens=False, parse_special=False))

        for text, parse_special in parts:
            start = 0
            for match in pattern.finditer(text) if parse_special and pattern is not None else ():
                plain.append(text[start : match.start()])
                flush()
                ids.append(self._special_id_of[match[0]])
                start = match.end()
            plain.append(text[start:])
        flush()
        return ids

    def _wrap(self, ids: list[int], add_special_tokens: bool) -> list[int]:
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens and (self._prefix or self._suffix) else ids
