"""Prompts of an exact number of tokens, all different, the same for every server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

_MAX_WORDS = 2000
_MIN_LETTERS, _MAX_LETTERS = 3, 9


class Prompts:
    """Draws prompts from words that are one token each, leading space included."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def text(self, key: str, num_tokens: int) -> str:
        """The prompt called `key`: always the same one, and sharing no prefix with another but by chance."""
        return "".join(random.Random(key).choices(self._words, k=num_tokens))

    def texts(self, key: str, num_prompts: int, num_tokens: int) -> list[str]:
        """Prompts `key/0`, `key/1`, ..."""
        return [self.text(f"{key}/{index}", num_tokens) for index in range(num_prompts)]


def one_token_words(model: Path) -> list[str]:
    """Lower-case words with a leading space that the model's tokenizer reads as one token. Raises ModelFileError."""
    from engine.tokenizer.load import tokenizer_from_path

    tokenizer = tokenizer_from_path(model)
    words: list[str] = []
    for token in tokenizer.token_table():
        word = token[1:]
        if token[:1] == b" " and word.isalpha() and word.islower() and _MIN_LETTERS <= len(word) <= _MAX_LETTERS:
            words.append(token.decode("ascii"))
    encoded = tokenizer.encode_batch(words, add_special_tokens=False)
    words = [word for word, ids in zip(words, encoded, strict=True) if len(ids) == 1]
    return random.Random(0).sample(words, min(_MAX_WORDS, len(words)))
