"""What a GGUF header says about its tokenizer, whatever its kind: tokens, types, special ids, template."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import ModelFileError
from engine.model_files.gguf_config import gguf_eos_ids
from engine.model_files.gguf_header import GgufHeader
from engine.tokenizer.base import TokenizerFacts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Values of tokenizer.ggml.token_type."""

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """The vocabulary (one entry per id) and the facts every kind shares."""

    tokens: list[str]
    types: list[int]
    common: TokenizerFacts


def gguf_facts(header: GgufHeader, *, adds_bos_default: bool) -> GgufFacts:
    """Read the tokenizer keys of a GGUF header. Raises ModelFileError for missing or inconsistent ones."""
    tokens = header.strings("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelFileError(f"{header.path}: tokenizer.ggml.tokens is empty")
    types_key = "tokenizer.ggml.token_type"
    types = list(header.integers(types_key)) if header.has(types_key) else [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelFileError(f"{header.path}: {types_key} has {len(types)} entries, not {len(tokens)}")

    ids = {name: header.optional_integer(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    named = {name: id for name, id in ids.items() if id is not None and 0 <= id < len(tokens)}
    eos_ids = tuple(id for id in gguf_eos_ids(header) if 0 <= id < len(tokens))
    bos_id = named.get("bos_token")
    special = {id for id, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)} | set(eos_ids)
    if bos_id is not None:
        special.add(bos_id)
    template = "tokenizer.chat_template"
    return GgufFacts(
        tokens=tokens,
        types=types,
        common=TokenizerFacts(
            special_ids=frozenset(special),
            bos_id=bos_id,
            eos_ids=eos_ids,
            adds_bos=header.boolean("tokenizer.ggml.add_bos_token", adds_bos_default),
            adds_eos=header.boolean("tokenizer.ggml.add_eos_token", False),
            chat_template=header.string(template) if header.has(template) else None,
            special_tokens={name: tokens[id] for name, id in named.items()},
        ),
    )
