from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from engine.errors import ModelFileError
from engine.model_files.gguf_header import read_gguf_header
from engine.tokenizer.from_gguf import resized_tokenizer
from engine.tokenizer.load import tokenizer_from_path
from engine.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tests.support.gguf_writer import Value, bpe_keys, write_gguf
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tests.support.tiny_tokenizer_texts import TEXTS


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tiny_tokenizer(tmp_path, 420)
    return tmp_path


def gguf(directory: Path, pre: str = "gpt-2", **changes: Value) -> Path:
    keys = bpe_keys(directory, pre) | {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return write_gguf(directory / "m.gguf", keys=keys)


def test_agrees_with_the_tokenizer_json_it_was_made_from(directory: Path) -> None:
    ours = tokenizer_from_path(gguf(directory, chat_template="{{ messages }}"))
    theirs = tokenizer_from_path(directory)
    for text in (*TEXTS, "<|im_start|>user\nhi<|im_end|>", "a<|pad_399|>b"):
        for parse_special in (True, False):
            assert ours.encode(text, add_special_tokens=True, parse_special=parse_special) == theirs.encode(
                text, add_special_tokens=True, parse_special=parse_special
            )
    assert ours.token_table() == theirs.token_table()
    assert (ours.vocab_size, ours.special_ids) == (theirs.vocab_size, theirs.special_ids)
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))
    assert ours.chat_template == "{{ messages }}"
    assert ours.special_tokens["eos_token"] == "<|im_end|>"


# What the families' own tokenizer.json files are built of, in the library's terms where it has a ready-made part.
REFERENCES: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "deepseek-coder": [
        pre_tokenizers.Split(Regex("[\r\n]"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?\p{L}+"), "isolated"),
        pre_tokenizers.Split(Regex(r"\s?\p{P}+"), "isolated"),
        pre_tokenizers.Split(Regex("[一-龥ࠀ-一가-퟿]+"), "isolated"),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.mark.parametrize("pre", REFERENCES)
def test_pieces_agree_with_the_ready_made_parts(directory: Path, pre: str) -> None:
    reference = Tokenizer.from_file(str(directory / "tokenizer.json"))
    reference.pre_tokenizer = pre_tokenizers.Sequence(REFERENCES[pre])
    tokenizer = tokenizer_from_path(gguf(directory, pre))
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("llama-bpe", "I'LL pay $12345\n\n now", ["I", "'LL", " pay", " $", "123", "45", "\n\n", " now"]),
        ("qwen2", "I'LL pay $123\n\n  now", ["I", "'LL", " pay", " $", "1", "2", "3", "\n\n", " ", " now"]),
        ("tekken", "fooBar 12//\nBAZ", ["foo", "Bar", " ", "1", "2", "//\n", "BAZ"]),
        ("default", "a$+b 1234", ["a", "$+", "b", " ", "123", "4"]),
        ("command-r", "x 12 y", ["x", " ", "1", "2", " y"]),
    ],
)
def test_pieces(pre: str, text: str, pieces: list[str]) -> None:
    splits = [(text, (0, 0))]
    for expression in PRE_TOKENIZERS[pre].expressions:
        split = pre_tokenizers.Split(Regex(expression), "isolated")
        splits = [found for piece, _ in splits for found in split.pre_tokenize_str(piece)]
    assert [piece for piece, _ in splits] == pieces


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_kind_loses_no_byte(directory: Path, pre: str) -> None:
    import unicodedata

    tokenizer = tokenizer_from_path(gguf(directory, pre))
    for text in TEXTS:
        expected = unicodedata.normalize("NFC", text) if PRE_TOKENIZERS[pre].nfc else text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == expected


def test_bos_and_eos(directory: Path) -> None:
    plain = tokenizer_from_path(gguf(directory)).encode("the", add_special_tokens=False)
    both = tokenizer_from_path(gguf(directory, ggml__add_bos_token=True, ggml__add_eos_token=True))
    assert both.encode("the", add_special_tokens=True) == [1, *plain, 2]
    assert both.encode("the", add_special_tokens=False) == plain


def test_all_end_ids(directory: Path) -> None:
    tokenizer = tokenizer_from_path(gguf(directory, ggml__eot_token_id=0, ggml__eom_token_id=100_000))
    assert tokenizer.eos_ids == (2, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ggml__pre": "martian"}, "'martian' is not supported, only default, gpt-2"),
        ({"ggml__model": "bert"}, "'bert' is not supported, only gpt2 and llama"),
        ({"ggml__token_type": [1, 2]}, "has 2 entries, not 420"),
        ({"ggml__merges": ["ab"]}, "is not two parts"),
        ({"ggml__merges": ["zzz qqq"]}, "cannot build the vocabulary"),
    ],
)
def test_errors(directory: Path, changes: dict[str, Value], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        tokenizer_from_path(gguf(directory, **changes))


@pytest.mark.parametrize("vocab_size", [2, 50, 300, 420, 1000])
def test_resized(directory: Path, vocab_size: int) -> None:
    header = read_gguf_header(gguf(directory))
    tokenizer = resized_tokenizer(header, vocab_size)
    assert tokenizer.vocab_size == len(tokenizer.token_table()) == vocab_size
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == ((2,) if vocab_size > 2 else ())
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert all(0 <= id < vocab_size for id in ids)
        if vocab_size >= 300:
            assert tokenizer.decode(ids) == text
    if vocab_size == 1000:
        assert tokenizer.token_bytes(420) == b"<|extra_0|>"
        assert 420 not in tokenizer.encode("<|extra_0|>", add_special_tokens=False)
