"""A GGUF header -> its tokenizer: byte-level BPE (`gpt2`) here, sentencepiece (`llama`) in its own module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import ModelFileError
from engine.model_files.gguf_header import GgufHeader
from engine.tokenizer.base import Tokenizer
from engine.tokenizer.byte_level import byte_alphabet, byte_level_bytes
from engine.tokenizer.gguf_facts import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, GgufFacts, gguf_facts
from engine.tokenizer.library import LibraryTokenizer
from engine.tokenizer.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

if TYPE_CHECKING:
    import tokenizers

_MERGES = "tokenizer.ggml.merges"


def tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    """Build the tokenizer a GGUF file carries. Raises ModelFileError for kinds that are not supported."""
    kind = header.string("tokenizer.ggml.model")
    if kind == "llama":
        from engine.tokenizer.sentencepiece import tokenizer_from_gguf_llama

        return tokenizer_from_gguf_llama(header)
    if kind != "gpt2":
        raise ModelFileError(f"{header.path}: GGUF tokenizer {kind[:80]!r} is not supported, only gpt2 and llama")
    pre = _pre_tokenizer(header)
    return _build(header.path, gguf_facts(header, adds_bos_default=pre.adds_bos), _merges(header), pre)


def resized_tokenizer(header: GgufHeader, vocab_size: int) -> Tokenizer:
    """A `gpt2` tokenizer cut to its first `vocab_size` ids, or padded with `<|extra_N|>`, which no text yields."""
    pre = _pre_tokenizer(header)
    facts = gguf_facts(header, adds_bos_default=False)
    merges = _merges(header)
    tokens, types, common = facts.tokens[:vocab_size], facts.types[:vocab_size], facts.common
    padding = vocab_size - len(tokens)
    tokens += [f"<|extra_{index}|>" for index in range(padding)]
    types += [NORMAL] * padding
    if padding == 0:
        kept = set(tokens)
        merges = [(a, b) for a, b in merges if a in kept and b in kept and a + b in kept]
    common = replace(
        common,
        special_ids=frozenset(id for id in common.special_ids if id < vocab_size),
        bos_id=common.bos_id if common.bos_id is not None and common.bos_id < vocab_size else None,
        eos_ids=tuple(id for id in common.eos_ids if id < vocab_size),
        special_tokens={name: text for name, text in common.special_tokens.items() if text in tokens},
    )
    return _build(header.path, GgufFacts(tokens, types, common), merges, pre)


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.string("tokenizer.ggml.pre", "default")
    kind = PRE_TOKENIZERS.get(name)
    if kind is None:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelFileError(f"{header.path}: tokenizer.ggml.pre {name[:80]!r} is not supported, only {known}")
    return kind


def _merges(header: GgufHeader) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(header.strings(_MERGES)):
        # The first part may itself begin with a space in files that do not use the byte alphabet.
        cut = line.find(" ", 1)
        if cut < 0 or cut + 1 == len(line):
            raise ModelFileError(
                f"{header.path}: {_MERGES}[{index}] {line[:80]!r} is not two parts with a space between"
            )
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def _build(path: str, facts: GgufFacts, merges: Sequence[tuple[str, str]], pre: PreTokenizer) -> LibraryTokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, types = facts.tokens, facts.types
    vocab: dict[str, int] = {}
    for id, token in enumerate(tokens):
        vocab.setdefault(token, id)
    # A vocabulary cut below the byte alphabet would otherwise drop characters without a trace.
    complete = all(char in vocab for char in byte_alphabet())
    try:
        model = models.BPE(
            vocab=vocab,
            merges=list(merges),
            ignore_merges=pre.whole_words,
            unk_token=None if complete else tokens[0],
        )
    except Exception as error:  # the library raises bare Exception, for example for a merge outside the vocabulary
        raise ModelFileError(
            f"{path}: the tokenizers library cannot build the vocabulary: {str(error)[:200]!r}"
        ) from error
    library = Tokenizer(model)
    if pre.nfc:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.Sequence(_splits(pre))
    library.decoder = decoders.ByteLevel()
    special = facts.common.special_ids
    library.add_special_tokens(
        [AddedToken(tokens[id], special=True, normalized=False) for id in sorted(special) if tokens[id]]
    )
    library.add_tokens(
        [
            AddedToken(token, special=False, normalized=False)
            for id, token in enumerate(tokens)
            if token and types[id] == USER_DEFINED and id not in special
        ]
    )
    literal = {id: tokens[id].encode() for id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN, USER_DEFINED)}

    def build_table() -> list[bytes]:
        out = byte_level_bytes(tokens)
        for id, text in literal.items():
            out[id] = text
        return out

    return LibraryTokenizer(library, facts.common, vocab_size=len(tokens), build_table=build_table)


def _splits(pre: PreTokenizer) -> list[tokenizers.pre_tokenizers.PreTokenizer]:
    from tokenizers import Regex, pre_tokenizers

    splits: list[tokenizers.pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in pre.expressions
    ]
    return [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
