from __future__ import annotations

import io
import json
import random
from pathlib import Path

import pytest
import sentencepiece

from engine.errors import ModelFileError
from engine.tokenizer.load import tokenizer_from_path
from tests.support.gguf_writer import Value, write_gguf
from tests.support.tiny_tokenizer import CORPUS
from tests.support.tiny_tokenizer_texts import TEXTS


@pytest.fixture(scope="module")
def proto() -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS[:5] * 3),
        model_writer=out,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["[TOOL]"],
        minloglevel=2,
    )
    return out.getvalue()


def gguf(directory: Path, proto: bytes, **changes: Value) -> Path:
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    size = library.get_piece_size()

    def kind(id: int) -> int:
        if library.is_unknown(id):
            return 2
        if library.is_control(id):
            return 3
        if library.is_byte(id):
            return 6
        return 4 if library.id_to_piece(id) == "[TOOL]" else 1

    keys: dict[str, Value] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(id) for id in range(size)],
        "tokenizer.ggml.scores": [float(library.get_score(id)) for id in range(size)],
        "tokenizer.ggml.token_type": [kind(id) for id in range(size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    keys.update({f"tokenizer.ggml.{key}": value for key, value in changes.items()})
    return write_gguf(directory / "m.gguf", keys=keys)


def texts() -> list[str]:
    random.seed(11)
    words = " ".join(CORPUS).split(" ")
    made = [" ".join(random.choices(words, k=random.randrange(1, 30))) for _ in range(300)]
    return [*TEXTS, *CORPUS, *made, "a [TOOL] b[TOOL]", "▁ underline ▁▁"]


@pytest.mark.parametrize("source", ["gguf", "model"])
def test_ids_equal_the_library_s(tmp_path: Path, proto: bytes, source: str) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    (tmp_path / "tokenizer.model").write_bytes(proto)
    tokenizer = tokenizer_from_path(gguf(tmp_path, proto) if source == "gguf" else tmp_path)
    assert tokenizer.encode_batch(texts(), add_special_tokens=False) == library.encode(texts())
    for text in texts():
        ids = tokenizer.encode(text, add_special_tokens=True)
        assert ids == [1, *library.encode(text)]
        assert tokenizer.decode(ids) == library.decode(ids) == text.replace("▁", " ")
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.special_ids) == (1, (2,), {0, 1, 2})
    assert tokenizer.special_tokens["eos_token"] == "</s>"
    assert tokenizer.vocab_size == library.get_piece_size()


def test_bytes_of_random_ids_decode_like_the_library(tmp_path: Path, proto: bytes) -> None:
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokenizer = tokenizer_from_path(gguf(tmp_path, proto))
    random.seed(2)
    for _ in range(300):
        ids = [random.randrange(3, tokenizer.vocab_size) for _ in range(16)]
        # The library writes one U+FFFD per stray byte, a UTF-8 decoder one per broken sequence.
        ours, theirs = (_without_repeats(text) for text in (tokenizer.decode(ids), library.decode(ids)))
        assert ours == theirs


def _without_repeats(text: str) -> str:
    while "\ufffd\ufffd" in text:
        text = text.replace("\ufffd\ufffd", "\ufffd")
    return text


def test_special_tokens_are_split_off(tmp_path: Path, proto: bytes) -> None:
    tokenizer = tokenizer_from_path(gguf(tmp_path, proto))
    hello = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("<s>the dog</s>", add_special_tokens=False) == [1, *hello, 2]
    plain = tokenizer.encode("<s>the dog</s>", add_special_tokens=False, parse_special=False)
    assert not {1, 2} & set(plain)
    assert tokenizer.decode(plain) == "<s>the dog</s>"
    assert tokenizer.encode_mixed([("<s>the", True), ("</s>", False), (" dog", True)]) == [
        1,
        *tokenizer.encode("the</s> dog", add_special_tokens=False, parse_special=False),
    ]


def test_space_prefix_and_flags(tmp_path: Path, proto: bytes) -> None:
    tokenizer = tokenizer_from_path(gguf(tmp_path, proto, add_space_prefix=False, add_bos_token=False))
    ids = tokenizer.encode("the", add_special_tokens=True)
    assert b"".join(tokenizer.token_bytes(id) for id in ids) == b"the"
    tokenizer = tokenizer_from_path(gguf(tmp_path, proto, add_eos_token=True))
    ids = tokenizer.encode("the", add_special_tokens=True)
    assert (ids[0], ids[-1]) == (1, 2)
    assert b"".join(tokenizer.token_bytes(id) for id in ids[1:-1]) == b" the"


def test_model_file_with_json_beside_it(tmp_path: Path, proto: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(proto)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": "<|end|>",
                "add_bos_token": False,
                "added_tokens_decoder": {
                    "420": {"content": "<|end|>", "special": True},
                    "421": {"content": "<word>", "special": False},
                },
                "chat_template": "C",
            }
        )
    )
    tokenizer = tokenizer_from_path(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.vocab_size, tokenizer.chat_template) == ((420,), 422, "C")
    assert tokenizer.encode("<|end|><word>", add_special_tokens=True) == [420, 421]
    plain = tokenizer.encode("<|end|><word>", add_special_tokens=False, parse_special=False)
    assert plain[-1] == 421
    assert 420 not in plain
    assert tokenizer.token_bytes(421) == b"<word>"


def test_errors(tmp_path: Path, proto: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ModelFileError, match=r"tokenizer\.model: the sentencepiece library cannot read it"):
        tokenizer_from_path(tmp_path / "tokenizer.model")
    with pytest.raises(ModelFileError, match="scores has 1 entries"):
        tokenizer_from_path(gguf(tmp_path, proto, scores=[0.5]))
    with pytest.raises(ModelFileError, match="beyond the vocabulary"):
        tokenizer_from_path(gguf(tmp_path, proto, unknown_token_id=10_000))
