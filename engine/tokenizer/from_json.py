"""tokenizer.json (+ the JSON files beside it) -> LibraryTokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.errors import ModelFileError
from engine.tokenizer.base import TokenizerFacts
from engine.tokenizer.decoders import parse_decoder
from engine.tokenizer.hf_facts import HfFacts, read_hf_facts
from engine.tokenizer.library import LibraryTokenizer

if TYPE_CHECKING:
    import tokenizers


class _DecoderPart(msgspec.Struct):
    decoder: object = None


def tokenizer_from_json(path: Path) -> LibraryTokenizer:
    """Build a tokenizer from a tokenizer.json. Raises ModelFileError."""
    from tokenizers import Tokenizer as Library

    try:
        data = path.read_bytes()
        decoder = parse_decoder(msgspec.json.decode(data, type=_DecoderPart).decoder, str(path))
    except (OSError, msgspec.DecodeError) as error:
        raise ModelFileError(f"{path}: not a readable tokenizer.json: {error}") from error
    try:
        library = Library.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for every mistake in the file
        raise ModelFileError(f"{path}: the tokenizers library cannot read it: {error}") from error

    hf = read_hf_facts(path.parent)
    _add_missing(library, hf)
    special_ids = {id for id, token in library.get_added_tokens_decoder().items() if token.special}
    bos_id = hf.id_of("bos_token", library.token_to_id)
    eos_id = hf.id_of("eos_token", library.token_to_id)
    facts = TokenizerFacts(
        special_ids=frozenset(special_ids | {id for id in (bos_id, eos_id) if id is not None}),
        bos_id=bos_id,
        eos_ids=() if eos_id is None else (eos_id,),
        adds_bos=bool(hf.adds_bos),
        adds_eos=bool(hf.adds_eos),
        chat_template=hf.chat_template,
        special_tokens=hf.special_tokens,
    )
    vocab_size = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def build_table() -> list[bytes]:
        entries = [""] * vocab_size
        for text, id in library.get_vocab(with_added_tokens=False).items():
            entries[id] = text
        table = decoder(entries)
        for id, token in library.get_added_tokens_decoder().items():
            table[id] = token.content.encode()
        return table

    return LibraryTokenizer(
        library,
        facts,
        vocab_size=vocab_size,
        build_table=build_table,
        strips_leading_space=decoder.strips_leading_space,
        # Explicit add_bos_token / add_eos_token replace the file's own post-processor; both would double the BOS.
        library_adds_special=hf.adds_bos is None,
    )


def _add_missing(library: tokenizers.Tokenizer, hf: HfFacts) -> None:
    """Add the tokens that only tokenizer_config.json knows, where the library gives them the very id it states.

    Tokens with a name (bos_token, ...) become special, as they are in the reference implementation.
    """
    from tokenizers import AddedToken

    known = library.get_added_tokens_decoder()
    for token in hf.added_tokens:
        if token.id in known:
            continue
        present = library.token_to_id(token.content)
        if present != token.id and not (present is None and token.id == library.get_vocab_size(with_added_tokens=True)):
            continue
        added = AddedToken(
            token.content,
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )
        if token.special:
            library.add_special_tokens([added])
        else:
            library.add_tokens([added])
    for text in hf.special_tokens.values():
        if library.token_to_id(text) is not None:
            library.add_special_tokens([AddedToken(text, normalized=False, special=True)])
