"""tokenizer.ggml.pre: which expressions split a text before BPE, as the families' public tokenizer files have them.

A text is split by each expression in turn (matches and what lies between them become pieces of their own).
"""

from __future__ import annotations

from dataclasses import dataclass

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREE_DIGITS = "[0-9][0-9][0-9]"
_CJK = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One kind: the expressions, in order, and what else its family does."""

    expressions: tuple[str, ...]
    whole_words: bool = False
    """A piece that is a token as it stands is taken without merging."""
    nfc: bool = False
    """The text is composed (Unicode NFC) first."""
    adds_bos: bool = False
    """Whether a BOS is added where the file does not say."""


_LLAMA3_KIND = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_DIGITWISE = PreTokenizer((r"\p{N}", _GPT2))
_GPT2_KIND = PreTokenizer((_GPT2,))
_QWEN2_KIND = PreTokenizer((_QWEN2,))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "gpt-2": _GPT2_KIND,
    "phi-2": _GPT2_KIND,
    "olmo": _GPT2_KIND,
    "mpt": _GPT2_KIND,
    "smollm": _DIGITWISE,
    "starcoder": _DIGITWISE,
    "refact": _DIGITWISE,
    "codeshell": _DIGITWISE,
    "command-r": PreTokenizer((r"\p{N}", _GPT2), nfc=True),
    "llama-bpe": _LLAMA3_KIND,
    "llama3": _LLAMA3_KIND,
    "llama-v3": _LLAMA3_KIND,
    "falcon3": _LLAMA3_KIND,
    "pixtral": _LLAMA3_KIND,
    "dbrx": PreTokenizer((_LLAMA3,)),
    "smaug-bpe": PreTokenizer((_LLAMA3,)),
    "qwen2": PreTokenizer((_QWEN2,), nfc=True),
    "deepseek-r1-qwen": _QWEN2_KIND,
    "megrez": _QWEN2_KIND,
    "stablelm2": _QWEN2_KIND,
    "tekken": PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
}
