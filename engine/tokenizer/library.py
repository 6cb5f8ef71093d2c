"""LibraryTokenizer: a tokenizer run by the `tokenizers` library, whoever built it (tokenizer.json or GGUF)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from engine.tokenizer.base import Tokenizer, TokenizerFacts

if TYPE_CHECKING:
    import tokenizers


class LibraryTokenizer(Tokenizer):
    """Wraps a tokenizers.Tokenizer of `vocab_size` ids; `build_table` makes the token table on first use.

    library_adds_special: the library's post-processor adds the special tokens, not the facts' adds_bos / adds_eos.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        facts: TokenizerFacts,
        *,
        vocab_size: int,
        build_table: Callable[[], list[bytes]],
        strips_leading_space: bool = False,
        library_adds_special: bool = False,
    ) -> None:
        super().__init__(facts)
        self.strips_leading_space = strips_leading_space
        # A file may ask for cutting and padding, which are a training set-up's and never a server's.
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._vocab_size = vocab_size
        self._build_table = build_table
        self._library_adds_special = library_adds_special

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[list[int]]:
        library = self._library if parse_special else self._plain_library
        encodings = library.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens and self._library_adds_special
        )
        return [self._wrap(encoding.ids, add_special_tokens) for encoding in encodings]

    @cached_property
    def _plain_library(self) -> tokenizers.Tokenizer:
        """A second tokenizer that reads special tokens as text: the switch is per object, and threads share objects."""
        from tokenizers import Tokenizer as Library

        added = self._library.get_added_tokens_decoder()
        # The vocabulary is shared with the first one, not copied.
        plain = Library(self._library.model)
        if self._library.normalizer is not None:
            plain.normalizer = self._library.normalizer
        if self._library.pre_tokenizer is not None:
            plain.pre_tokenizer = self._library.pre_tokenizer
        if self._library.post_processor is not None:
            plain.post_processor = self._library.post_processor
        for id in sorted(added):
            (plain.add_special_tokens if added[id].special else plain.add_tokens)([added[id]])
        if plain.get_added_tokens_decoder().keys() != added.keys():
            # Ids with gaps cannot be rebuilt by adding tokens one after the other.
            plain = Library.from_str(self._library.to_str())
        plain.encode_special_tokens = True
        return plain

    def _build_token_table(self) -> list[bytes]:
        return self._build_table()
