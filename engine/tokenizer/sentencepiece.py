"""SentencePieceTokenizer: run by the `sentencepiece` library, from tokenizer.model or a GGUF `llama` vocabulary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import ModelFileError
from engine.model_files.gguf_header import GgufHeader
from engine.tokenizer.base import Tokenizer, TokenizerFacts
from engine.tokenizer.gguf_facts import gguf_facts
from engine.tokenizer.hf_facts import read_hf_facts
from engine.tokenizer.sentencepiece_proto import (
    CONTROL,
    UNKNOWN,
    UNUSED,
    SentencePieceSpec,
    model_proto,
)

_SPACE = "▁"
_MAX_THREADS = 8
_LARGEST_SCORE = 3.4e38


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model plus tokens outside of it.

    special: text -> id of the tokens found in a text only with parse_special.
    added: text -> id of ordinary tokens that the model's file does not know; always found.
    """

    def __init__(
        self,
        proto: bytes,
        facts: TokenizerFacts,
        *,
        special: Mapping[str, int],
        added: Mapping[str, int],
        adds_dummy_prefix: bool,
        file: str,
    ) -> None:
        from sentencepiece import SentencePieceProcessor

        super().__init__(facts)
        try:
            self._library = SentencePieceProcessor(model_proto=proto)
        except (RuntimeError, OSError, ValueError) as error:
            raise ModelFileError(f"{file}: the sentencepiece library cannot read it: {str(error)[:200]!r}") from error
        self.strips_leading_space = adds_dummy_prefix
        self._literals = {**special, **added}
        self._split_all = _splitter(self._literals)
        self._split_added = _splitter(added)
        self._vocab_size = max([self._library.get_piece_size() - 1, *self._literals.values()]) + 1

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def encode_batch(
        self, texts: Sequence[str], *, add_special_tokens: bool, parse_special: bool = True
    ) -> list[list[int]]:
        split = self._split_all if parse_special else self._split_added
        # Odd pieces of a split are the literals. All plain pieces of all texts go to the library in one call.
        pieces = [split.split(text) if split else [text] for text in texts]
        plain = [piece for parts in pieces for piece in parts[::2] if piece]
        threads = min(_MAX_THREADS, len(plain))
        encoded = iter(self._library.encode(plain, num_threads=threads) if plain else [])
        out: list[list[int]] = []
        for parts in pieces:
            ids: list[int] = []
            for index, piece in enumerate(parts):
                if index % 2:
                    ids.append(self._literals[piece])
                elif piece:
                    ids += next(encoded)
            out.append(self._wrap(ids, add_special_tokens))
        return out

    def _build_token_table(self) -> list[bytes]:
        library = self._library
        table = [b""] * self._vocab_size
        for id in range(library.get_piece_size()):
            piece = library.id_to_piece(id)
            if library.is_byte(id):
                table[id] = bytes([int(piece[3:5], 16)])
            elif library.is_control(id) or library.is_unknown(id):
                table[id] = piece.encode()
            else:
                table[id] = piece.replace(_SPACE, " ").encode()
        for text, id in self._literals.items():
            table[id] = text.encode()
        return table


def _splitter(literals: Mapping[str, int]) -> re.Pattern[str] | None:
    if not literals:
        return None
    return re.compile("(" + "|".join(re.escape(text) for text in sorted(literals, key=len, reverse=True)) + ")")


def tokenizer_from_model(path: Path) -> SentencePieceTokenizer:
    """Build a tokenizer from a tokenizer.model (sentencepiece) and the JSON files beside it. Raises ModelFileError."""
    from sentencepiece import SentencePieceProcessor

    try:
        proto = path.read_bytes()
        library = SentencePieceProcessor(model_proto=proto)
    except (RuntimeError, OSError, ValueError) as error:
        raise ModelFileError(f"{path}: the sentencepiece library cannot read it: {str(error)[:200]!r}") from error
    num_pieces = library.get_piece_size()
    hf = read_hf_facts(path.parent)
    special = {
        library.id_to_piece(id): id for id in range(num_pieces) if library.is_control(id) or library.is_unknown(id)
    }
    added: dict[str, int] = {}
    for token in hf.added_tokens:
        if token.special:
            special[token.content] = token.id
        elif token.id >= num_pieces:
            added[token.content] = token.id

    def look_up(text: str) -> int | None:
        if text in special:
            return special[text]
        id = added.get(text, library.piece_to_id(text))
        return id if id < num_pieces and library.id_to_piece(id) == text else added.get(text)

    bos_id = hf.id_of("bos_token", look_up)
    eos_id = hf.id_of("eos_token", look_up)
    if bos_id is None and library.bos_id() >= 0:
        bos_id = library.bos_id()
    if eos_id is None and library.eos_id() >= 0:
        eos_id = library.eos_id()
    names = {"bos_token": bos_id, "eos_token": eos_id, "unk_token": library.unk_id(), "pad_token": library.pad_id()}
    pieces = {name: library.id_to_piece(id) for name, id in names.items() if id is not None and 0 <= id < num_pieces}
    facts = TokenizerFacts(
        special_ids=frozenset(special.values()),
        bos_id=bos_id,
        eos_ids=() if eos_id is None else (eos_id,),
        # The family's convention where the files are silent: a BOS in front, no EOS behind.
        adds_bos=hf.adds_bos is not False,
        adds_eos=bool(hf.adds_eos),
        chat_template=hf.chat_template,
        special_tokens={**pieces, **hf.special_tokens},
    )
    return SentencePieceTokenizer(
        proto,
        facts,
        special=special,
        added=added,
        adds_dummy_prefix=_starts_with_space(library),
        file=str(path),
    )


def _starts_with_space(library: object) -> bool:
    # The normaliser's settings are not readable; what it does to a text is.
    normalize = getattr(library, "normalize", None)
    return normalize is not None and str(normalize("a")).startswith(_SPACE)


def tokenizer_from_gguf_llama(header: GgufHeader) -> SentencePieceTokenizer:
    """Build the tokenizer of a GGUF whose tokenizer.ggml.model is `llama`. Raises ModelFileError."""
    facts = gguf_facts(header, adds_bos_default=True)
    pieces, scores = facts.tokens, header.numbers("tokenizer.ggml.scores")
    if len(scores) != len(pieces):
        raise ModelFileError(f"{header.path}: tokenizer.ggml.scores has {len(scores)} entries, not {len(pieces)}")
    if not all(abs(score) <= _LARGEST_SCORE for score in scores):
        raise ModelFileError(f"{header.path}: tokenizer.ggml.scores must be finite float32 numbers")
    unk_id = header.integer("tokenizer.ggml.unknown_token_id", 0)
    if not 0 <= unk_id < len(pieces):
        raise ModelFileError(f"{header.path}: tokenizer.ggml.unknown_token_id {unk_id} is beyond the vocabulary")
    types = [UNUSED if kind == UNKNOWN else kind for kind in facts.types]
    types[unk_id] = UNKNOWN
    adds_dummy_prefix = header.boolean("tokenizer.ggml.add_space_prefix", True)
    charsmap = "tokenizer.ggml.precompiled_charsmap"
    spec = SentencePieceSpec(
        pieces=pieces,
        scores=scores,
        types=types,
        unk_id=unk_id,
        bos_id=facts.common.bos_id,
        eos_id=facts.common.eos_ids[0] if facts.common.eos_ids else None,
        add_dummy_prefix=adds_dummy_prefix,
        remove_extra_whitespaces=header.boolean("tokenizer.ggml.remove_extra_whitespaces", False),
        precompiled_charsmap=header.data(charsmap) if header.has(charsmap) else b"",
    )
    special = {pieces[id]: id for id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)}
    return SentencePieceTokenizer(
        model_proto(spec),
        facts.common,
        special=special,
        added={},
        adds_dummy_prefix=adds_dummy_prefix,
        file=header.path,
    )
